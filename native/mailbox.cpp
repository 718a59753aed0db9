#include "mailbox.hpp"

namespace tapchannel {

MailboxCore::MailboxCore(std::unique_ptr<Port> port, std::vector<ControlBlock> blocks,
                         std::vector<std::vector<CellGeometry>> cells, size_t depth,
                         uint64_t slot_bytes, bool fill_released)
    : port_(std::move(port)),
      depth_(depth),
      slot_bytes_(slot_bytes),
      fill_released_(fill_released) {
  ForkGuard::install();
  for (size_t i = 0; i < blocks.size(); ++i) {
    Lane lane;
    lane.block = std::move(blocks[i]);
    lane.cells = std::move(cells[i]);
    lanes_.push_back(std::move(lane));
    store_lane_words(lanes_.back());
  }
  thread_ = std::thread([this, port = port_] { monitor(port); });
}

MailboxCore::~MailboxCore() {
  if (fork_.forked()) {  // thread, driver state and memory are the parent's
    new std::thread(std::move(thread_));
    leave_gate();
    new std::shared_ptr<Port>(port_);
    return;
  }
  close();
  // Reads may still be queued on a stream: the arena must outlive them. Wait, bounded; rather leak
  // than unmap under a kernel.
  Patience patience(10.0);
  for (auto& [id, record] : leases_)
    while (record.hold == Hold::dropped ||
           (record.hold == Hold::releasing &&
            !(port_->released(record.word, id) && port_->filled(record.fill)))) {
      if (record.hold == Hold::dropped &&
          port_->release(record.streams, record.word, id, 0, 0) != Given::refused)
        record.hold = Hold::releasing;
      if (record.poisoned) poison_words(record);
      patience.tick();
      if (patience.over()) {
        new std::shared_ptr<Port>(port_);
        return;
      }
      sleep_ns(50000);
    }
}

Verdict MailboxCore::standing() const {
  if (closed_) return Verdict::of(Fault::closed);
  return failure_;
}

Verdict MailboxCore::check() {
  if (fork_.forked()) return Verdict::of(Fault::forked);
  std::lock_guard lock(mutex_);
  return standing();
}

uint64_t MailboxCore::epoch() {
  if (fork_.forked()) return 0;
  std::lock_guard lock(mutex_);
  return epoch_;
}

Verdict MailboxCore::open_pass(uint64_t step, uint64_t microbatches) {
  if (fork_.forked()) return Verdict::of(Fault::forked);
  std::lock_guard lock(mutex_);
  if (Verdict bad = standing()) return bad;
  if (open_) return Verdict::of(Fault::pass_open, make_stamp(epoch_, step_, 0));
  if (static_cast<int64_t>(step) <= last_step_) {
    Verdict bad = Verdict::of(Fault::step_not_growing);
    bad.seen = step;
    bad.expected = static_cast<uint64_t>(last_step_);
    return bad;
  }
  for (size_t i = 0; i < lanes_.size(); ++i) {
    watch_lane(lanes_[i]);
    if (!lanes_[i].lost && !lanes_[i].revoked) continue;
    return lane_fault(lanes_[i], i, make_stamp(epoch_, step, 0));
  }
  step_ = step;
  microbatches_ = microbatches;
  last_step_ = static_cast<int64_t>(step);
  granted_ = 0;
  received_.assign(microbatches, Received::no);
  open_ = true;
  tell_gate();
  for (auto& lane : lanes_) {
    if (lane.attached) lane.attached_in_pass = pass();
    store_lane_words(lane);
    record(lane.block.consumer_ring(), Step::open_pass, make_stamp(epoch_, step_, microbatches), 0,
           0);
  }
  advance();
  return {};
}

// Step 1. In key order: a key is granted once the slot's older leases are gone and the slot's
// former key has been received.
void MailboxCore::advance() {
  if (!open_ || failure_) return;
  uint64_t before = granted_;
  while (granted_ < microbatches_ && blockers(granted_, false).empty()) {
    strip_poison(granted_ % depth_);
    ++granted_;
  }
  if (granted_ == before) return;
  tell_gate();
  for (auto& lane : lanes_) {
    if (lane.barred_pass == pass()) continue;
    lane.block.consumer().credit.value.store(make_stamp(epoch_, step_, granted_),
                                             std::memory_order_release);
    record(lane.block.consumer_ring(), Step::grant, make_stamp(epoch_, step_, granted_), 0, 0);
    tell(lane);
  }
  ring(credit_bell_);
}

// A poisoned word would satisfy every later wait. It is cleared when its slot is granted anew: then
// no wait is pending on it. Compare-and-swap, since a late stamp of the old key may land meanwhile,
// and that one must stay.
void MailboxCore::strip_poison(size_t slot) {
  for (auto& lane : lanes_)
    for (size_t cell = 0; cell < lane.cells.size(); ++cell) {
      auto& word = lane.block.stamp(slot, cell);
      uint64_t seen = word.load(std::memory_order_acquire);
      while ((seen & kPoison) != 0 &&
             !word.compare_exchange_weak(seen, 0, std::memory_order_acq_rel)) {
      }
    }
}

// What keeps `microbatch` from being granted. hard: leave out what is already on its way back in
// stream order.
std::vector<Holder> MailboxCore::blockers(uint64_t microbatch, bool hard) const {
  std::vector<Holder> found;
  for (uint64_t next = hard ? granted_ : microbatch; next <= microbatch; ++next) {
    size_t slot = next % depth_;
    if (next >= depth_ && received_[next - depth_] == Received::no)
      found.push_back({step_, next - depth_, static_cast<int>(slot), false});
    for (const auto& [id, record] : leases_) {
      bool older = record.pass != pass() || record.microbatch < next;
      if (record.slot != slot || !older || (hard && record.hold == Hold::releasing)) continue;
      found.push_back({record.pass & ((1ULL << kStepBits) - 1), record.microbatch,
                       static_cast<int>(slot), true});
    }
  }
  return found;
}

std::vector<Holder> MailboxCore::holders() {
  if (fork_.forked()) return {};
  std::lock_guard lock(mutex_);
  std::vector<Holder> found;
  for (const auto& [id, record] : leases_)
    if (record.hold != Hold::releasing)
      found.push_back({record.pass & ((1ULL << kStepBits) - 1), record.microbatch,
                       static_cast<int>(record.slot), true});
  return found;
}

Verdict MailboxCore::close_pass(double timeout_s, const Interrupt::Ask& interrupted) {
  if (fork_.forked()) return Verdict::of(Fault::forked);
  std::unique_lock lock(mutex_);
  if (Verdict bad = standing()) return bad;
  if (!open_) return Verdict::of(Fault::no_pass);
  for (uint64_t i = 0; i < microbatches_; ++i)
    if (received_[i] == Received::no) {
      Verdict bad = Verdict::of(Fault::incomplete, make_stamp(epoch_, step_, i + 1));
      bad.expected = microbatches_;
      for (auto state : received_) bad.seen += state != Received::no ? 1 : 0;
      return bad;
    }
  if (Verdict bad = wait_granted(lock, timeout_s, interrupted)) return bad;
  open_ = false;
  tell_gate();
  for (auto& lane : lanes_) {
    if (lane.barred_pass != pass())
      lane.block.consumer().completed.value.store(make_stamp(epoch_, step_, 1),
                                                  std::memory_order_release);
    record(lane.block.consumer_ring(), Step::close_pass, make_stamp(epoch_, step_, microbatches_),
           0, 0);
  }
  return {};
}

// Needs no handshake with a living lane: pass numbers are never used again, and a lane's copies
// leave in order on one stream.
void MailboxCore::end_pass(const std::string& reason) {
  open_ = false;
  tell_gate();
  for (auto& [id, record] : leases_) {
    if (!record.waiting) continue;
    record.failure = Verdict::of(Fault::aborted_here, record.key);
    record.failure.reason = reason;
    doom(id, record);
  }
  for (auto& lane : lanes_) {
    auto& words = lane.block.consumer();
    write_text(words.reason, reason);
    words.aborted.value.store(make_stamp(epoch_, step_, 0), std::memory_order_release);
    words.credit.value.store(0, std::memory_order_release);
    record(lane.block.consumer_ring(), Step::abort, make_stamp(epoch_, step_, 0), 0, 0);
    tell(lane);
  }
  received_.clear();
  ring(credit_bell_);
}

void MailboxCore::abort(const std::string& reason) {
  if (fork_.forked()) return;
  std::lock_guard lock(mutex_);
  if (closed_) return;
  if (open_ || failure_) end_pass(reason);
  failure_ = {};
}

Verdict MailboxCore::reset() {
  if (fork_.forked()) return Verdict::of(Fault::forked);
  std::lock_guard lock(mutex_);
  if (closed_) return Verdict::of(Fault::closed);
  end_pass("the mailbox was reset");
  failure_ = {};
  ++epoch_;
  last_step_ = -1;
  for (auto& lane : lanes_) {
    if (std::exchange(lane.revoked, false))
      lane.block.consumer().state.value.store(static_cast<uint64_t>(LaneState::empty),
                                              std::memory_order_release);
    store_lane_words(lane);
  }
  return {};
}

void MailboxCore::close() {
  if (fork_.forked()) return;
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    if (open_ || failure_) end_pass("the mailbox was closed");
    for (auto& [id, record] : leases_)
      if (record.waiting) doom(id, record);
    closed_ = true;
    for (auto& lane : lanes_) {
      lane.block.consumer().state.value.store(static_cast<uint64_t>(LaneState::closed),
                                              std::memory_order_release);
      record(lane.block.consumer_ring(), Step::close, 0, 0, 0);
      tell(lane);
    }
  }
  ring(bell_);
  poison_the_rest();
  stop_.store(true, std::memory_order_release);
  ring(bell_);
  ring(credit_bell_);
  if (thread_.joinable()) thread_.join();
  if (gate_) gate_->close();
  std::lock_guard lock(mutex_);
  end_lanes();
  // The slots' memory is somebody's HBM: it goes now unless a view still reads it. The control
  // blocks stay for the flight recorder.
  if (leases_.empty()) port_.reset();
}

}  // namespace tapchannel
