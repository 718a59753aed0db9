// The lane's progress thread: sends queued pushes as credit comes, lets sources go, watches the
// peer.
#include "outbox.hpp"
#include "socket_end.hpp"

namespace tapchannel {

namespace {
constexpr uint64_t kTick = 20000000ULL;     // 20 ms: heartbeat, peer watch
constexpr uint64_t kSilentTick = 50000ULL;  // 50 us, while a push waits for credit
constexpr uint64_t kCopyTick =
    1000000ULL;  // 1 ms while copies are in flight: their sources are somebody's memory
}  // namespace

// Step 2. Its place is the slot's, so it is written only once credit covers the key.
void OutboxCore::announce(const Pending& pending, size_t slot, uint64_t bytes) {
  const Push& push = pending.push;
  Announce& announce = block_.announce(slot, push.cell);
  announce.key.store(0, std::memory_order_release);
  announce.rows = push.source.rows;
  announce.row_begin = push.row_begin;
  announce.dtype = cells_[push.cell].dtype;
  announce.ndim = push.ndim;
  std::copy(push.shape, push.shape + kMaxDims, announce.shape);
  announce.flags = pending.dropped ? kDropped : push.checksummed ? kChecksummed : 0u;
  announce.checksum = push.checksum;
  announce.key.store(pending.key, std::memory_order_release);
  record(block_.producer_ring(), Step::announce, pending.key, push.cell, bytes);
}

// Steps 2, 5 and 6 of one push; touches no state but the wire's. One call at a time a lane: under
// the lock, or draining.
void OutboxCore::send(const Pending& pending) {
  const Push& push = pending.push;
  const CellGeometry& cell = cells_[push.cell];
  size_t slot = push.microbatch % block_.depth();
  auto& events = block_.producer_ring();
  uint64_t bytes = pending.dropped ? 0 : push.source.rows * cell.row_bytes;

  bool ahead = transport_->announces_ahead();
  if (ahead) announce(pending, slot, bytes);

  Place place{slot * slot_bytes_ + cell.offset + push.row_begin * cell.pitch, slot + push.cell,
              slot * cells_.size() + push.cell};
  if (pending.dropped)
    transport_->put_poison(place, push.source.rows, cell);
  else if (push.source.rows != 0 && cell.row_bytes != 0)
    transport_->put(pending.token, push.source, place, cell);
  else if (pending.token != nullptr)
    transport_->forget(pending.token);
  record(events, Step::put, pending.key, push.cell, bytes);

  transport_->stamp({block_.stamp(slot, push.cell), pending.key, block_.announce(slot, push.cell)},
                    place);
  record(events, Step::stamp, pending.key, push.cell, bytes);
  // Where put and stamp are only enqueued, the announce follows the enqueue: an announced key is
  // then one whose stamp is on its way, and a consumer of this very process may make its stream
  // wait without holding up our copy (DESIGN section 6, I6).
  if (!ahead) announce(pending, slot, bytes);
  ring(block_.producer().bell);
}

// The consumer may sleep on our bell, or have words of its own that ours are carried to.
void OutboxCore::tell() {
  ring(block_.producer().bell);
  transport_->kick();
}

void OutboxCore::sent(const Pending& pending, bool in_call) {
  const Push& push = pending.push;
  ++issued_;
  if (pass_of(pending.key) == pass()) ++sent_count_;
  counters_.bytes += pending.dropped ? 0 : push.source.rows * cells_[push.cell].row_bytes;
  if (push.owner == nullptr) return;
  // A copy that ended inside the caller's own push cannot have seen a later change: nothing to
  // check.
  bool done = transport_->immediate();
  Retired source{push.owner, done && in_call ? -1 : push.version, pending.key, push.cell};
  if (done)
    retired_.push_back(source);
  else
    in_flight_.push_back({issued_, push.microbatch % block_.depth(), source});
}

// The next push that credit covers, in order of the pushes. One that waits must not hold up a later
// one: the credit that it waits for may depend on just that.
bool OutboxCore::take_covered(Pending& next) {
  auto found = std::find_if(queue_.begin(), queue_.end(),
                            [this](const Pending& pending) { return credit_covers(pending.key); });
  if (found == queue_.end()) return false;
  next = *found;
  queue_.erase(found);
  waiting_ -= next.waits ? 1 : 0;
  queue_wait_ = Patience(timeout_s_);
  return true;
}

// Sends what credit covers. The lock is open during the copy, so that a push meanwhile queues up
// instead of waiting.
void OutboxCore::drain(std::unique_lock<std::mutex>& lock) {
  if (draining_) return;
  draining_ = true;
  Pending pending{};
  while (!failure_ && take_covered(pending)) {
    counters_.credit_wait_s += static_cast<double>(now_ns() - pending.queued_at) / 1e9;
    lock.unlock();
    std::string error;
    try {
      send(pending);
    } catch (const std::exception& caught) {
      error = caught.what();
    }
    lock.lock();
    sent(pending, false);
    if (!error.empty()) device_failed(error);
  }
  draining_ = false;
  drained_.notify_all();
}

void OutboxCore::drop_queue(const std::function<bool(uint64_t)>& over) {
  std::deque<Pending> kept;
  for (auto& pending : queue_) {
    if (!over(pending.key)) {
      kept.push_back(pending);
      continue;
    }
    waiting_ -= pending.waits ? 1 : 0;
    if (pending.token != nullptr) transport_->forget(pending.token);
    if (pending.push.owner != nullptr)
      retired_.push_back({pending.push.owner, -1, pending.key, pending.push.cell});
  }
  queue_.swap(kept);
  drained_.notify_all();
}

// A source is free once its copy has been performed, and the stamp behind the copy says so. A
// poisoned or cleared stamp says nothing: then the copy stream itself is asked.
void OutboxCore::reap() {
  if (in_flight_.empty()) return;
  uint64_t performed = transport_->performed();
  while (!in_flight_.empty()) {
    const InFlight& flight = in_flight_.front();
    uint64_t word = block_.stamp(flight.slot, flight.source.cell).load(std::memory_order_acquire);
    if (flight.number > performed && !reached(word, flight.source.key)) break;
    retired_.push_back(flight.source);
    in_flight_.pop_front();
  }
  if (in_flight_.empty()) drained_.notify_all();
}

std::vector<Retired> OutboxCore::take_retired(bool attempt) {
  if (fork_.forked()) return {};
  std::unique_lock lock(mutex_, std::defer_lock);
  if (!attempt)
    lock.lock();
  else if (!lock.try_lock())
    return {};
  reap();
  return std::exchange(retired_, {});
}

// The oldest queued push has a deadline: a consumer that never gives credit must become an error,
// not a growing queue.
void OutboxCore::watch_queue() {
  const auto& peer = block_.consumer();
  if (queue_.empty()) return;
  auto dead = [this](const Pending& pending) { return static_cast<bool>(over(pending.key)); };
  if (std::any_of(queue_.begin(), queue_.end(), dead)) {
    size_t before = queue_.size();
    drop_queue([this](uint64_t key) {
      Verdict why = over(key);  // flush, the next push and close_pass say so
      if (why && !dropped_ && pass_of(key) == pass()) dropped_ = why;
      return static_cast<bool>(why);
    });
    undelivered_ += before - queue_.size();
  }
  if (queue_.empty()) return;
  uint64_t key = queue_.front().key;
  queue_wait_.tick();
  if (!queue_wait_.over() || credit_covers(key)) return;
  Verdict bad = Verdict::of(Fault::credit_timeout, key, static_cast<int>(queue_.front().push.cell));
  bad.seen = peer.credit.value.load(std::memory_order_acquire);
  bad.expected = key;
  bad.waited = queue_wait_.waited_s();
  bad.limit = timeout_s_;
  bad.silent = seconds_since(peer.heartbeat.value.load(std::memory_order_acquire));
  fail(std::move(bad), "no credit came before the deadline");
}

// The lane has ended, and no abort brings it back.
bool OutboxCore::gone() const {
  return failure_.fault == Fault::peer_lost || failure_.fault == Fault::peer_closed ||
         failure_.fault == Fault::revoked;
}

void OutboxCore::watch_peer() {
  const auto& peer = block_.consumer();
  auto state = static_cast<LaneState>(peer.state.value.load(std::memory_order_acquire));
  bool closed = state == LaneState::closed, revoked = state == LaneState::revoked;
  if (gone() || (!closed && !revoked && !socket_ended(socket_))) return;
  failure_ = Verdict::of(revoked ? Fault::revoked : closed ? Fault::peer_closed : Fault::peer_lost);
  failure_.silent = seconds_since(peer.heartbeat.value.load(std::memory_order_acquire));
  if (revoked)
    failure_.reason = read_text(peer.reason);
  else if (!closed)
    failure_.reason = transport_->failure();
  record(block_.producer_ring(), Step::lost, 0, 0, 0);
  reap();
  undelivered_ += queue_.size() + in_flight_.size() + (draining_ ? 1 : 0);
  drop_queue([](uint64_t) { return true; });
}

void OutboxCore::progress() {
  transport_->enter_thread();
  auto& peer = block_.consumer();
  uint64_t marked_at = 0;
  while (!stop_.load(std::memory_order_acquire)) {
    uint32_t credit = peer.bell.count.load(std::memory_order_seq_cst);
    uint32_t queued = idle_bell_.count.load(std::memory_order_seq_cst);
    bool retired = false, copying = false, idle = false;
    {
      std::unique_lock lock(mutex_);
      watch_peer();
      drain(lock);
      watch_queue();
      reap();
      copying = !in_flight_.empty();
      if (copying && now_ns() - marked_at > kTick) {
        marked_at = now_ns();
        transport_->mark();
      }
      block_.producer().heartbeat.value.store(now_ns(), std::memory_order_release);
      retired = !retired_.empty();
      idle = queue_.empty();
    }
    if (retired && on_retired_) on_retired_();
    // Credit matters only while something waits for it: an idle thread is not woken by each grant.
    Bell& bell = idle ? idle_bell_ : peer.bell;
    uint32_t seen = idle ? queued : credit;
    uint64_t tick = copying ? kCopyTick : kTick;
    if (!idle && !transport_->rings()) tick = kSilentTick;  // credit comes without a bell
    sleep_on(
        bell, tick,
        [&] {
          return stop_.load(std::memory_order_acquire) ||
                 bell.count.load(std::memory_order_seq_cst) != seen;
        },
        idle || !transport_->rings() ? 0 : kAwake);
  }
}

}  // namespace tapchannel
