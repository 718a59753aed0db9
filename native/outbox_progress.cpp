// The lane's progress thread: sends queued pushes as credit comes, lets sources go, watches the
// peer.
#include <sys/socket.h>

#include "outbox.hpp"

namespace tapchannel {

namespace {
constexpr uint64_t kTick = 20000000ULL;  // 20 ms: heartbeat, peer watch
constexpr uint64_t kCopyTick =
    1000000ULL;  // 1 ms while copies are in flight: their sources are somebody's memory
}  // namespace

// The next push that credit covers, in order of the pushes. One that waits must not hold up a later
// one: the credit that it waits for may depend on just that.
bool OutboxCore::take_covered(Pending& next) {
  auto found = std::find_if(queue_.begin(), queue_.end(),
                            [this](const Pending& pending) { return credit_covers(pending.key); });
  if (found == queue_.end()) return false;
  next = *found;
  queue_.erase(found);
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

bool OutboxCore::socket_ended() const {
  char byte;
  ssize_t got = recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
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

void OutboxCore::watch_peer() {
  const auto& peer = block_.consumer();
  bool said_closed =
      peer.state.value.load(std::memory_order_acquire) == static_cast<uint64_t>(LaneState::closed);
  if (failure_.fault == Fault::peer_lost || failure_.fault == Fault::peer_closed ||
      (!said_closed && !socket_ended()))
    return;
  failure_ = Verdict::of(said_closed ? Fault::peer_closed : Fault::peer_lost);
  failure_.silent = seconds_since(peer.heartbeat.value.load(std::memory_order_acquire));
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
    uint32_t before = peer.bell.count.load(std::memory_order_seq_cst);
    bool retired = false, copying = false;
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
    }
    if (retired && on_retired_) on_retired_();
    sleep_on(peer.bell, copying ? kCopyTick : kTick, [&] {
      return stop_.load(std::memory_order_acquire) ||
             peer.bell.count.load(std::memory_order_seq_cst) != before;
    });
  }
}

}  // namespace tapchannel
