// What a key still lacks, and whose lane it is.
#include "mailbox.hpp"

namespace tapchannel {

bool MailboxCore::gave_up(const ProducerWords& words, uint64_t pass) {
  return std::any_of(std::begin(words.aborted), std::end(words.aborted), [pass](const Word& word) {
    uint64_t aborted = word.value.load(std::memory_order_acquire);
    return aborted != 0 && pass_of(aborted) == pass;
  });
}

// Why the lane will never bring this key, if so.
Verdict MailboxCore::lane_fault(Lane& lane, size_t index, uint64_t key) {
  Verdict bad = Verdict::of(Fault::none, key);
  bad.lane = static_cast<int>(index);
  if (lane.revoked) {
    bad.fault = Fault::revoked;
    bad.reason = lane.why;
  } else if (lane.lost || lane.barred_pass == pass_of(key)) {
    bad.fault = Fault::peer_lost;
    bad.reason = lane.why;
  } else if (lane.ever && !lane.attached) {
    bad.fault = Fault::peer_closed;
  }
  return bad.fault == Fault::none ? Verdict{} : bad;
}

// Judged before anything that has landed: pushes that were queued before the mailbox opened the
// pass are sent, and whether they have landed yet must not decide what the caller is told.
Verdict MailboxCore::count_fault(size_t index, uint64_t key) {
  const Lane& lane = lanes_[index];
  uint64_t theirs = lane.block.producer().open_pass.value.load(std::memory_order_acquire);
  uint64_t mine = make_stamp(epoch_, step_, microbatches_);
  if (!lane.attached || theirs == mine || pass_of(theirs) != pass_of(key) || pass_of(key) != pass())
    return {};
  Verdict bad = Verdict::of(Fault::pass_mismatch, key);
  bad.lane = static_cast<int>(index);
  bad.seen = theirs;
  bad.expected = mine;
  return bad;
}

// What one lane still lacks of the key: would_block with the cell, or a fault that waiting cannot
// mend.
Verdict MailboxCore::lane_unmet(size_t index, const RecvRequest& request, uint64_t key,
                                bool stamps) {
  Lane& lane = lanes_[index];
  size_t slot = request.microbatch % depth_;
  bool announces = request.need_announces || lane.same_process || stamps;
  // What a revoked lane has brought is not taken either: its access was taken for a reason.
  if (lane.revoked) return lane_fault(lane, index, key);
  if (Verdict bad = count_fault(index, key)) return bad;
  for (size_t cell = 0; cell < lane.cells.size(); ++cell) {
    uint64_t seen = lane.block.stamp(slot, cell).load(std::memory_order_acquire);
    uint64_t said = lane.block.announce(slot, cell).key.load(std::memory_order_acquire);
    bool here = reached(seen, key);
    Verdict found = Verdict::of(Fault::would_block, key, static_cast<int>(cell));
    found.slot = static_cast<int>(slot);
    found.lane = static_cast<int>(index);
    found.seen = seen;
    if (here && seen != key) {
      found.fault = Fault::overrun;
      found.expected = key;
      return found;
    }
    bool enough = here || (!stamps && passed(index, cell, slot, key));
    if (enough && (said == key || !announces)) continue;
    Verdict bad = gate_fault(index, cell, slot, key);
    if (!bad && !underway(index, cell, slot, key)) bad = lane_fault(lane, index, key);
    if (bad) {
      bad.cell = found.cell;
      bad.slot = found.slot;
      return bad;
    }
    found.expected = said == key ? 1 : 0;
    return found;
  }
  return announces ? bad_announce(lane, index, slot, key) : Verdict{};
}

// What the key still lacks. A fault of any lane comes before a wait for another.
Verdict MailboxCore::unmet(const RecvRequest& request, uint64_t key, bool stamps) {
  Verdict want;
  for (size_t i = 0; i < lanes_.size(); ++i) {
    Verdict found = lane_unmet(i, request, key, stamps);
    if (found && found.fault != Fault::would_block) return found;
    if (found && !want) want = std::move(found);
  }
  return want;
}

// A pass that a producer gave up is over, also where its tap has landed: it may have been taken
// back.
Verdict MailboxCore::given_up(uint64_t key) {
  for (size_t i = 0; i < lanes_.size(); ++i) {
    const auto& words = lanes_[i].block.producer();
    if (!lanes_[i].ever || !gave_up(words, pass_of(key))) continue;
    Verdict bad = Verdict::of(Fault::aborted_by_peer, key);
    bad.lane = static_cast<int>(i);
    bad.reason = read_text(words.reason);
    return bad;
  }
  return {};
}

}  // namespace tapchannel
