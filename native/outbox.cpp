#include "outbox.hpp"

#include <sys/socket.h>

namespace tapchannel {

namespace {
constexpr uint64_t kTick = 20000000ULL;  // 20 ms: heartbeat, peer watch
constexpr uint64_t kFinishLimit = 10000000000ULL;

}  // namespace

OutboxCore::OutboxCore(ControlBlock block, std::unique_ptr<Transport> transport,
                       std::vector<CellGeometry> cells, uint64_t slot_bytes, bool drop_newest,
                       size_t queue_limit, double timeout_s, double credit_wait_s, int socket)
    : block_(std::move(block)),
      transport_(std::move(transport)),
      cells_(std::move(cells)),
      slot_bytes_(slot_bytes),
      drop_newest_(drop_newest),
      queue_limit_(queue_limit),
      timeout_s_(timeout_s),
      credit_wait_s_(credit_wait_s),
      socket_(socket) {
  ForkGuard::install();
  ForkGuard::close_in_child(socket_);
  auto& words = block_.producer();
  words.heartbeat.value.store(now_ns(), std::memory_order_release);
  words.state.value.store(static_cast<uint64_t>(LaneState::attached), std::memory_order_release);
  record(block_.producer_ring(), Step::attach, 0, 0, 0);
  transport_->begin(block_, socket_);
}

void OutboxCore::start(std::function<void()> on_retired) {
  on_retired_ = std::move(on_retired);
  thread_ = std::thread([this] { progress(); });
}

OutboxCore::~OutboxCore() {
  if (fork_.forked()) {
    // The thread lives in the parent: neither join nor signal, and leave every handle to the
    // parent.
    new std::thread(std::move(thread_));
    static_cast<void>(transport_.release());
    return;
  }
  close();
}

Verdict OutboxCore::check_peer() {
  if (fork_.forked()) return Verdict::of(Fault::forked);
  if (closed_) return Verdict::of(Fault::closed);
  // An idle thread of ours looks only now and then; whoever calls wants to know now.
  uint64_t state = block_.consumer().state.value.load(std::memory_order_acquire);
  if (state != static_cast<uint64_t>(LaneState::empty)) watch_peer();
  return failure_;
}

// A mailbox that closed after it had got everything ended normally.
Verdict OutboxCore::check_delivered() {
  Verdict bad = check_peer();
  return bad.fault == Fault::peer_closed && undelivered_ == 0 ? Verdict{} : bad;
}

Verdict OutboxCore::check() {
  if (fork_.forked()) return Verdict::of(Fault::forked);
  std::lock_guard lock(mutex_);
  return check_delivered();
}

void OutboxCore::device_failed(const std::string& reason) {
  Verdict bad = Verdict::of(Fault::device_error);
  bad.reason = reason;
  if (!failure_) fail(std::move(bad), reason);
}

void OutboxCore::modified(const Retired& source) {
  if (fork_.forked()) return;
  std::lock_guard lock(mutex_);
  if (failure_) return;
  fail(Verdict::of(Fault::source_modified, source.key, static_cast<int>(source.cell)),
       "a source tensor was modified in place before its copy was done");
}

Verdict OutboxCore::flush(double timeout_s, const Interrupt::Ask& interrupted) {
  if (fork_.forked()) return Verdict::of(Fault::forked);
  std::unique_lock lock(mutex_);
  Patience patience(timeout_s);
  Interrupt interrupt(interrupted);
  while (true) {
    if (Verdict bad = check_delivered()) return bad;
    lock.unlock();
    bool stop = interrupt.happened();
    lock.lock();
    if (stop) return Verdict::of(Fault::interrupted);
    drain(lock);
    reap();
    if (dropped_) return std::exchange(dropped_, {});
    if (queue_.empty() && in_flight_.empty() && !draining_) return {};
    patience.tick();
    if (patience.over()) break;
    bool copying = queue_.empty();
    drained_.wait_for(lock, std::chrono::nanoseconds(
                                std::min<uint64_t>(patience.left_ns(), copying ? 200000 : kTick)));
  }
  Verdict bad = Verdict::of(Fault::credit_timeout);
  if (!queue_.empty()) {
    bad.key = queue_.front().key;
    bad.cell = static_cast<int>(queue_.front().push.cell);
  } else if (!in_flight_.empty()) {
    bad.key = in_flight_.front().source.key;
    bad.cell = static_cast<int>(in_flight_.front().source.cell);
  }
  bad.seen = block_.consumer().credit.value.load(std::memory_order_acquire);
  bad.expected = bad.key;
  bad.waited = patience.waited_s();
  bad.limit = timeout_s;
  bad.silent = seconds_since(block_.consumer().heartbeat.value.load(std::memory_order_acquire));
  return bad;
}

bool OutboxCore::has_credit(uint64_t microbatch) {
  std::lock_guard lock(mutex_);
  return open_ && credit_covers(make_stamp(epoch_, step_, microbatch + 1));
}

bool OutboxCore::carried(uint64_t limit_ns) {
  std::lock_guard lock(mutex_);
  return !closed_ && transport_->settle(limit_ns);
}

OutboxCounters OutboxCore::counters() {
  if (fork_.forked()) return {};
  std::lock_guard lock(mutex_);
  counters_.queued = queue_.size();
  return counters_;
}

void OutboxCore::close() {
  if (fork_.forked()) return;
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    drop_queue([](uint64_t) { return true; });
  }
  stop_.store(true, std::memory_order_release);
  ring(block_.consumer().bell);
  ring(idle_bell_);
  transport_->cancel();
  if (thread_.joinable()) thread_.join();
  std::unique_lock lock(mutex_);
  // A flush on another thread may be in the middle of a copy.
  drained_.wait_for(lock, std::chrono::nanoseconds(kFinishLimit), [this] { return !draining_; });
  bool clean = !draining_ && transport_->finish(kFinishLimit);
  reap();
  for (auto& flight : in_flight_) retired_.push_back(flight.source);
  in_flight_.clear();
  auto& words = block_.producer();
  record(block_.producer_ring(), Step::close, 0, 0, 0);
  // Only when nothing is in flight any more: the consumer lets the next life of this lane in
  // without a further fence.
  if (clean)
    words.state.value.store(static_cast<uint64_t>(LaneState::closed), std::memory_order_release);
  tell();
  static_cast<void>(transport_->settle(kFinishLimit));
  shutdown(socket_, SHUT_RDWR);   // the consumer is to put nothing into a link that ends now
  if (clean) transport_.reset();  // unmaps the mailbox's memory
  ForkGuard::forget(socket_);
  ::close(socket_);
  socket_ = -1;
}

}  // namespace tapchannel
