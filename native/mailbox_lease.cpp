// What becomes of a lease: poison, streams that read it, its way back (step 9).
#include "mailbox.hpp"

namespace tapchannel {

namespace {
constexpr double kFillPatience = 0.5;  // seconds that a poisoned wait goes on for its pattern, and
constexpr double kLastPatience = 1.0;
constexpr uint64_t kLastNap = 100000ULL;
constexpr double kFillRate = 5e9;  // bytes a second that the pattern is expected to make at least
}  // namespace

// The wait has failed; what its stream will see is poison.
void MailboxCore::doom(uint64_t id, LeaseRecord& record) {
  record.waiting = false;
  record.doomed = true;
  poison_if_due(id, record);
}

// Neither pattern nor word may reach an older lease on the slot. It may be a good one whose reads
// are still queued, or wait for its own key, which the word would satisfy. It does not wait for
// ours: a wait is enqueued on a slot only behind the releases of its older leases.
void MailboxCore::poison_if_due(uint64_t id, LeaseRecord& record) {
  auto older = [&](const auto& entry) {
    return entry.first < id && entry.second.slot == record.slot;
  };
  if (record.doomed && std::none_of(leases_.begin(), leases_.end(), older)) poison(record);
}

// First the pattern, then the word that lets the stream go on (I4). Where the driver itself is
// stuck behind the stream the pattern cannot be written in time: the wait must end all the same
// (I3), the lease raises, and the slot is not granted anew before the late pattern has been
// performed.
void MailboxCore::poison(LeaseRecord& record) {
  std::vector<Region> regions;
  uint64_t bytes = 0;
  for (auto& lane : lanes_)
    for (size_t cell = 0; cell < lane.cells.size(); ++cell) {
      const auto& stamp = lane.block.stamp(record.slot, cell);
      if (reached(stamp.load(std::memory_order_acquire), record.key)) continue;
      const auto& geometry = lane.cells[cell];
      uint64_t offset = record.slot * slot_bytes_ + geometry.offset;
      regions.push_back({offset, geometry.tap_rows, geometry});
      bytes += geometry.tap_rows * geometry.row_bytes;
    }
  record.fill = port_->start_fill(std::move(regions));
  Patience patience(kFillPatience + static_cast<double>(bytes) / kFillRate);
  while (!port_->filled(record.fill) && !patience.over()) {
    sleep_ns(20000);
    patience.tick();
  }
  poison_words(record);
  record.doomed = false;
  record.poisoned = true;
}

// Also again, until the stream has gone by: a late stamp of a dead pass may have overwritten the
// poison before the stream looked at the word, and it satisfies nobody.
void MailboxCore::poison_words(const LeaseRecord& record) {
  for (auto& lane : lanes_)
    for (size_t cell = 0; cell < lane.cells.size(); ++cell) {
      auto& word = lane.block.stamp(record.slot, cell);
      uint64_t seen = word.load(std::memory_order_acquire);
      if (landed(seen, record.key)) continue;
      while (!landed(seen, record.key) &&
             !word.compare_exchange_weak(seen, record.key | kPoison, std::memory_order_acq_rel)) {
      }
      tapchannel::record(lane.block.consumer_ring(), Step::poison, record.key, cell, 0);
    }
}

void MailboxCore::fail(uint64_t id, LeaseRecord& record, Verdict verdict) {
  record.failure = verdict;
  doom(id, record);
  if (!failure_) failure_ = std::move(verdict);
  ring(credit_bell_);
}

// Its next life begins: what still waits for the last one is told now, since nobody could tell
// later.
void MailboxCore::fail_waits(size_t index) {
  for (auto& [id, record] : leases_) {
    if (!record.waiting) continue;
    RecvRequest request;
    request.microbatch = record.microbatch;
    Verdict bad = lane_unmet(index, request, record.key, true);
    if (bad && bad.fault != Fault::would_block) fail(id, record, std::move(bad));
  }
}

// The mailbox closes: its monitor has done this once the older leases are gone; rather too early
// than never.
void MailboxCore::poison_the_rest() {
  Patience patience(kLastPatience);
  while (true) {
    {
      std::lock_guard lock(mutex_);
      bool doomed = false;
      for (auto& [id, record] : leases_) {
        if (record.doomed && patience.over()) poison(record);
        doomed = doomed || record.doomed;
      }
      if (!doomed) return;
    }
    sleep_ns(kLastNap);
    patience.tick();
  }
}

// While a lease is open nobody has credit for its slot: with another stamp there, the bytes may be
// another key's, too (I1).
Verdict MailboxCore::overwritten(const LeaseRecord& record) const {
  for (size_t i = 0; i < lanes_.size(); ++i)
    for (size_t cell = 0; cell < lanes_[i].cells.size(); ++cell) {
      uint64_t seen = lanes_[i].block.stamp(record.slot, cell).load(std::memory_order_acquire);
      if (seen == record.key) continue;
      Verdict bad =
          Verdict::of(reached(seen, record.key) ? Fault::overrun : Fault::stale_stamp, record.key);
      bad.lane = static_cast<int>(i);
      bad.cell = static_cast<int>(cell);
      bad.slot = static_cast<int>(record.slot);
      bad.seen = seen;
      bad.expected = record.key;
      return bad;
    }
  return {};
}

Verdict MailboxCore::check_lease(uint64_t lease) {
  if (fork_.forked()) return Verdict::of(Fault::forked);
  std::lock_guard lock(mutex_);
  auto found = leases_.find(lease);
  if (found == leases_.end()) return {};
  LeaseRecord& record = found->second;
  if (record.failure || record.waiting) return record.failure;
  record.failure = overwritten(record);
  if (record.failure && !failure_) {
    failure_ = record.failure;
    ring(credit_bell_);
  }
  return record.failure;
}

bool MailboxCore::record_stream(uint64_t lease, uintptr_t stream) {
  if (fork_.forked()) return false;
  std::lock_guard lock(mutex_);
  auto found = leases_.find(lease);
  if (found == leases_.end() || found->second.hold != Hold::held) return false;
  auto& streams = found->second.streams;
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
  return true;
}

size_t MailboxCore::take_word() {
  if (free_words_.empty()) return words_used_++;
  size_t word = free_words_.back();
  free_words_.pop_back();
  return word;
}

void MailboxCore::drop(uint64_t lease) noexcept {
  if (fork_.forked()) return;
  std::lock_guard lock(mutex_);
  auto found = leases_.find(lease);
  if (found == leases_.end() || found->second.hold != Hold::held) return;
  found->second.hold = Hold::dropped;
  give_back(lease, found->second);
  if (closed_ && leases_.empty()) port_.reset();
}

// Step 9. On a GPU the credit follows when the word behind the reads has been written; the monitor
// sees it.
void MailboxCore::give_back(uint64_t id, LeaseRecord& record) {
  Given given = port_->release(record.streams, record.word, id, record.slot * slot_bytes_,
                               fill_released_ ? slot_bytes_ : 0);
  if (given == Given::refused) return;  // the monitor tries again
  for (auto& lane : lanes_)
    tapchannel::record(lane.block.consumer_ring(), Step::release, record.key, 0, 0);
  record.hold = Hold::releasing;
  if (given == Given::performed) {
    if (open_ && record.pass == pass()) received_[record.microbatch] = Received::released;
    free_words_.push_back(record.word);
    leases_.erase(id);
    advance();
  }
  if (given != Given::performed) ring(bell_);
}

}  // namespace tapchannel
