// A push in its caller's thread: what may be pushed, credit, and the copy itself or its place in
// the queue (steps 2 to 6).
#include "outbox.hpp"

namespace tapchannel {

namespace {
constexpr uint64_t kTick = 20000000ULL;     // 20 ms
constexpr uint64_t kSilentTick = 50000ULL;  // 50 us: our thread is sending, or credit has no bell
}  // namespace

Verdict OutboxCore::check_push(const Push& push) {
  if (Verdict bad = check_peer()) return bad;
  if (!open_) return Verdict::of(Fault::no_pass);
  uint64_t key = make_stamp(epoch_, step_, push.microbatch + 1);
  if (push.microbatch >= microbatches_) {
    Verdict bad = Verdict::of(Fault::bad_microbatch, make_stamp(epoch_, step_, microbatches_));
    bad.seen = push.microbatch;
    return bad;
  }
  if (push.cell >= cells_.size()) return Verdict::of(Fault::bad_cell, key);
  const auto& cell = cells_[push.cell];
  uint64_t limit = push.row_begin > cell.tap_rows ? 0 : cell.tap_rows - push.row_begin;
  limit = std::min(limit, cell.row_limit);
  if (push.source.rows > limit || push.row_begin > cell.tap_rows) {
    Verdict bad = Verdict::of(Fault::bad_rows, key, static_cast<int>(push.cell));
    bad.seen = push.source.rows;
    bad.expected = limit;
    return bad;
  }
  if (pushed_[push.microbatch * cells_.size() + push.cell])
    return Verdict::of(Fault::pushed_twice, key, static_cast<int>(push.cell));
  Verdict bad = over(key);
  uint64_t theirs = block_.consumer().open_pass.value.load(std::memory_order_acquire);
  uint64_t mine = make_stamp(epoch_, step_, microbatches_);
  if (!bad && pass_of(theirs) == pass() && theirs != mine) {
    bad = Verdict::of(Fault::pass_mismatch, key);
    bad.seen = theirs;
    bad.expected = mine;
  }
  if (bad) bad.cell = static_cast<int>(push.cell);
  return bad;
}

// Step 3. Credit names the last key that may be written; it counts only for the pass that it was
// given in. A pass that was closed had all its credit.
bool OutboxCore::credit_covers(uint64_t key) const {
  const auto& peer = block_.consumer();
  uint64_t credit = peer.credit.value.load(std::memory_order_acquire);
  if (pass_of(credit) == pass_of(key)) return count_of(credit) >= count_of(key);
  return pass_of(peer.completed.value.load(std::memory_order_acquire)) == pass_of(key);
}

Verdict OutboxCore::queue_full(const Push& push, uint64_t key) const {
  Verdict bad = Verdict::of(Fault::queue_full, key, static_cast<int>(push.cell));
  bad.seen = waiting_;
  bad.waited = queue_wait_.waited_s();
  bad.limit = timeout_s_;
  return bad;
}

// Step 3 where a put is only enqueued on a GPU. A call of the trainer's that waits for the GPU may
// keep the driver's lock (a copy to pageable memory on the legacy stream does), and what it waits
// for may need this very tap. Our own thread could then not enqueue the copy until it is too late
// (I6). So the caller enqueues it before push returns, and waits for credit here, where no lock is
// held. Credit that depends on a later push of this thread never comes: after the limit our thread
// takes over after all.
Verdict OutboxCore::await_credit(std::unique_lock<std::mutex>& lock, const Push& push, uint64_t key,
                                 Interrupt::AskPlain interrupted) {
  auto& bell = block_.consumer().bell;
  Patience patience(credit_wait_s_);
  Interrupt interrupt(interrupted);
  while (true) {
    uint32_t seen = bell.count.load(std::memory_order_seq_cst);
    bool covered = credit_covers(key);
    if ((covered && !draining_) || patience.over()) break;
    uint64_t tick = draining_ || !transport_->rings() ? kSilentTick : kTick;
    uint64_t awake = draining_ ? 0 : kAwake;
    auto ready = [&, in_turn = !draining_] {
      return bell.count.load(std::memory_order_seq_cst) != seen || (in_turn && credit_covers(key));
    };
    lock.unlock();
    bool stop = interrupt.happened();
    if (!stop) sleep_on(bell, std::min(tick, patience.left_ns()), ready, awake);
    lock.lock();
    if (stop) return Verdict::of(Fault::interrupted);
    if (Verdict bad = check_push(push)) return bad;
    patience.tick();
  }
  counters_.credit_wait_s += patience.waited_s();
  return {};
}

Verdict OutboxCore::push(const Push& push, Interrupt::AskPlain interrupted) {
  if (fork_.forked()) return Verdict::of(Fault::forked);
  std::unique_lock lock(mutex_);
  if (Verdict bad = check_push(push)) return bad;
  uint64_t key = make_stamp(epoch_, step_, push.microbatch + 1);
  bool dropped = drop_newest_ && !credit_covers(key);
  bool in_call = !dropped && transport_->in_call();
  if (in_call && !transport_->immediate() && (draining_ || !credit_covers(key)))
    if (Verdict bad = await_credit(lock, push, key, interrupted)) return bad;
  bool credit = !dropped && credit_covers(key);
  if (!credit && !dropped && waiting_ >= queue_limit_) return queue_full(push, key);
  Pending pending{push, key, nullptr, dropped, now_ns()};
  try {
    if (!dropped) pending.token = transport_->order(push.stream);  // step 4
  } catch (const CapturingError&) {
    return Verdict::of(Fault::capturing, key, static_cast<int>(push.cell));
  }
  if (dropped) {  // nothing of the source is kept: its cell will get the poison pattern
    retired_.push_back({push.owner, -1, key, push.cell});
    pending.push.owner = nullptr;
    ++counters_.dropped;
  }
  if (credit && in_call && !draining_)
    send_now(pending);
  else
    enqueue(pending, credit);
  pushed_[push.microbatch * cells_.size() + push.cell] = true;
  ++pushed_count_;
  ++counters_.pushes;
  return {};
}

void OutboxCore::send_now(const Pending& pending) {
  try {
    send(pending);
  } catch (const std::exception& error) {
    device_failed(
        error.what());  // the consumer hears of it at once; the caller gets the error itself
    throw;
  }
  bool first = in_flight_.empty();
  sent(pending, true);
  if (first && !in_flight_.empty()) ring(idle_bell_);  // from now on it looks for performed copies
}

void OutboxCore::enqueue(const Pending& pending, bool credit) {
  if (!credit) {
    ++waiting_;
    record(block_.producer_ring(), Step::claim, pending.key, pending.push.cell, 0);
    ++counters_.deferred;
  }
  if (queue_.empty()) queue_wait_ = Patience(timeout_s_);
  queue_.push_back(pending);
  queue_.back().waits = !credit;
  counters_.queued_peak = std::max<uint64_t>(counters_.queued_peak, queue_.size());
  // Credit may have come since it was looked at, and then the consumer's ring came too early for
  // this push.
  ring(idle_bell_);
  if (credit || credit_covers(pending.key)) ring(block_.consumer().bell);
}

}  // namespace tapchannel
