// The passes of an outbox: open, close, abort, and why one is over.
#include "outbox.hpp"

namespace tapchannel {

// Why credit for this key will never come: its pass was aborted, its epoch ended, or the mailbox
// has opened a later pass.
Verdict OutboxCore::over(uint64_t key) const {
  const auto& peer = block_.consumer();
  uint64_t epoch = peer.epoch.value.load(std::memory_order_acquire);
  uint64_t opened = peer.open_pass.value.load(std::memory_order_acquire);
  Verdict bad;
  if (pass_of(peer.aborted.value.load(std::memory_order_acquire)) >= pass_of(key)) {
    bad = Verdict::of(Fault::aborted_by_peer, key);
    bad.reason = read_text(peer.reason);
  } else if (epoch != epoch_of(key)) {
    bad = Verdict::of(Fault::epoch_mismatch, key);
    bad.seen = make_stamp(epoch, 0, 0);
  } else if (pass_of(opened) > pass_of(key) && !credit_covers(key)) {
    bad = Verdict::of(Fault::pass_over, key);
    bad.seen = opened;
  }
  bad.expected = key;
  return bad;
}

Verdict OutboxCore::open_pass(uint64_t step, uint64_t microbatches) {
  if (fork_.forked()) return Verdict::of(Fault::forked);
  std::lock_guard lock(mutex_);
  if (Verdict bad = check_peer()) return bad;
  if (open_) return Verdict::of(Fault::pass_open, make_stamp(epoch_, step_, 0));
  uint64_t epoch = block_.consumer().epoch.value.load(std::memory_order_acquire);
  if (epoch != epoch_) last_step_ = -1;  // a new life counts its passes anew
  if (static_cast<int64_t>(step) <= last_step_) {
    Verdict bad = Verdict::of(Fault::step_not_growing);
    bad.seen = step;
    bad.expected = static_cast<uint64_t>(last_step_);
    return bad;
  }
  epoch_ = epoch;
  step_ = step;
  microbatches_ = microbatches;
  last_step_ = static_cast<int64_t>(step);
  pushed_.assign(microbatches * cells_.size(), false);
  pushed_count_ = sent_count_ = undelivered_ = 0;
  dropped_ = {};
  open_ = true;
  block_.producer().open_pass.value.store(make_stamp(epoch_, step_, microbatches),
                                          std::memory_order_release);
  transport_->kick();
  record(block_.producer_ring(), Step::open_pass, make_stamp(epoch_, step_, microbatches), 0, 0);
  return {};
}

Verdict OutboxCore::close_pass() {
  if (fork_.forked()) return Verdict::of(Fault::forked);
  std::lock_guard lock(mutex_);
  if (Verdict bad = check_delivered()) return bad;
  if (!open_) return Verdict::of(Fault::no_pass);
  // A pass that was sent whole is a success, whatever became of later ones: the consumer may be in
  // them already.
  uint64_t ended = pass_of(block_.consumer().aborted.value.load(std::memory_order_acquire));
  if (ended == pass() || (ended > pass() && sent_count_ != pushed_.size()))
    return over(make_stamp(epoch_, step_, 0));
  if (dropped_) return std::exchange(dropped_, {});
  if (pushed_count_ != pushed_.size()) {
    Verdict bad = Verdict::of(Fault::incomplete, make_stamp(epoch_, step_, 0));
    bad.seen = pushed_count_;
    bad.expected = pushed_.size();
    for (size_t i = 0; i < pushed_.size() && bad.cell < 0; ++i)
      if (!pushed_[i]) {
        bad.cell = static_cast<int>(i % cells_.size());
        bad.key = make_stamp(epoch_, step_, i / cells_.size() + 1);
      }
    return bad;
  }
  open_ = false;
  record(block_.producer_ring(), Step::close_pass, make_stamp(epoch_, step_, microbatches_), 0, 0);
  return {};
}

void OutboxCore::abort_pass(uint64_t pass, const std::string& reason) {
  auto& words = block_.producer();
  uint64_t word = pass << kMicrobatchBits;
  write_text(words.reason, reason);
  words.aborted[aborts_++ % kAbortsKept].value.store(word | 1, std::memory_order_release);
  record(block_.producer_ring(), Step::abort, word, 0, 0);
  tell();
  drop_queue([pass](uint64_t key) { return pass_of(key) == pass; });
}

void OutboxCore::fail(Verdict verdict, const std::string& reason) {
  // The pass that it happened in need not be the one that is open by now.
  uint64_t failed = verdict.key != 0 ? pass_of(verdict.key) : pass();
  failure_ = std::move(verdict);
  abort_pass(failed, reason);
}

void OutboxCore::abort(const std::string& reason) {
  if (fork_.forked()) return;
  std::lock_guard lock(mutex_);
  if (closed_) return;
  if (open_ || failure_)
    abort_pass(pass(), reason);
  else  // what was closed and still waits for credit: left alone, it would fail in the next pass
    while (!queue_.empty()) abort_pass(pass_of(queue_.front().key), reason);
  dropped_ = {};
  open_ = false;
  if (!gone()) failure_ = {};
}

}  // namespace tapchannel
