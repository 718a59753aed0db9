// The endpoint's thread: progress, deadlines, and the way out.
#include <sched.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "ucx_endpoint.hpp"

namespace tapchannel::ucx {

namespace {
constexpr int kTickMs = 100;             // an idle endpoint looks this often
constexpr int kPendingTickMs = 20;       // with operations under way: for their deadline
constexpr int kNapMs = 1;                // where UCX cannot wake: between looks at operations
constexpr int kIdleNapMs = 5;            // and between looks at nothing
constexpr int kBurst = 64;               // calls of progress before the lock is given away
constexpr unsigned kClosesAnyTime = 14;  // UCX 1.14
constexpr uint64_t kLinger = 50000;      // 50 us: looks on for more before it sleeps
constexpr uint64_t kCloseLimit = 2000000000ULL;

// A peer has nothing to say on the socket once it is live: an end, or any byte, ends the lane.
bool readable(int socket) {
  char byte;
  ssize_t got = recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}
}  // namespace

// UCX 1.13 aborts the process when it takes several of a peer's puts from a connection that the
// peer has closed since: it answers each of them, and the second answer meets an endpoint that the
// first has failed. A peer that goes ends its socket first, so that tells, ahead of what is left to
// read.
void Endpoint::note_end() {
  int socket = socket_.load(std::memory_order_acquire);
  if (socket >= 0 && failure_.empty() && readable(socket))
    fail("the peer's process ended, or its connection did");
}

void Endpoint::judge_deadline(bool moved) {
  if (pending_ == 0 || moved) {
    patience_ = Patience(limit_s_);
    return;
  }
  patience_.tick();
  if (patience_.over())
    fail("the peer answered nothing for " + std::to_string(static_cast<int>(limit_s_)) +
         " s: the network between the hosts is cut, or its process is stopped");
}

// Before 1.14 UCX aborts the process when an endpoint over verbs is closed, or its worker
// destroyed, while its request to connect waits to be sent: while the peer's device is silent.
bool Endpoint::closing_aborts() const {
  return !stands_ && one_sided() && api().minor < kClosesAnyTime;
}

// Leaves all that UCX holds for the endpoint to the process's end; nothing can land by it, since it
// was never connected.
void Endpoint::abandon() noexcept {
  abandoned_ = true;
  ep_ = nullptr;
  static_cast<void>(new std::shared_ptr<Context>(context_));
}

// Ends what UCX still does for the endpoint; its operations end as cancelled.
void Endpoint::close_endpoint() noexcept {
  if (ep_ == nullptr) return;
  if (closing_aborts()) return abandon();
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  for (ucp_rkey_h& key : keys_)
    if (key != nullptr) api().ucp_rkey_destroy(std::exchange(key, nullptr));
  ucs_status_ptr_t request = api().ucp_ep_close_nbx(std::exchange(ep_, nullptr), &param);
  if (request == nullptr || UCS_PTR_IS_ERR(request)) return;
  uint64_t began = now_ns();
  while (api().ucp_request_check_status(request) == UCS_INPROGRESS &&
         now_ns() - began < kCloseLimit)
    if (api().ucp_worker_progress(worker_) == 0) sleep_ns(100000);
  api().ucp_request_free(request);
}

void Endpoint::wait() {
  int limit = kTickMs;
  {
    std::lock_guard lock(mutex_);
    if (pending_ != 0) limit = kPendingTickMs;
    if (worker_fd_ < 0)
      limit = pending_ != 0 ? kNapMs : kIdleNapMs;
    else if (api().ucp_worker_arm(worker_) == UCS_ERR_BUSY)
      return;  // something came meanwhile
  }
  epoll_event events[4];
  int count = epoll_wait(poll_fd_, events, 4, limit);
  for (int i = 0; i < count; ++i) {
    if (events[i].data.fd == kick_fd_) {
      uint64_t kicks;
      static_cast<void>(!::read(kick_fd_, &kicks, sizeof(kicks)));
    }
    if (events[i].data.fd == socket_.load(std::memory_order_acquire) &&
        readable(events[i].data.fd)) {
      epoll_ctl(poll_fd_, EPOLL_CTL_DEL, events[i].data.fd, nullptr);
      std::lock_guard lock(mutex_);
      fail("the peer's process ended, or its connection did");
    }
  }
}

void Endpoint::run() {
  uint64_t moved_at = 0;
  auto guard = context_->enter();
  while (!stop_.load(std::memory_order_acquire)) {
    unsigned moved = 0;
    {
      std::lock_guard lock(mutex_);
      note_end();
      if (!failure_.empty()) close_endpoint();
      for (int i = 0; i < kBurst && !abandoned_; ++i) {
        unsigned now = api().ucp_worker_progress(worker_);
        moved += now;
        if (now == 0) break;
      }
      judge_deadline(moved != 0);
      if (!failure_.empty())
        close_endpoint();
      else
        look();
    }
    if (moved != 0) {
      arrived();
      moved_at = now_ns();
    } else if (now_ns() - moved_at < kLinger) {
      sched_yield();  // to sleep and be woken takes longer than what follows usually does
    } else {
      wait();
    }
  }
}

// At exit the driver may be gone already; the endpoint must be closed all the same.
std::unique_ptr<cuda::ContextGuard> Endpoint::guard_or_none() const noexcept {
  try {
    return context_->enter();
  } catch (const std::exception&) {  // nothing of UCX's on the GPU is left to work in
    return nullptr;
  }
}

void Endpoint::end() noexcept {
  if (fork_.forked()) return;
  std::lock_guard ending(end_mutex_);
  if (worker_ == nullptr) return;
  stop_.store(true, std::memory_order_release);
  kick();
  if (thread_.joinable()) thread_.join();
  auto guard = guard_or_none();
  std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = "the lane was ended";
  close_endpoint();
  ucp_worker_h worker = std::exchange(worker_, nullptr);
  if (!abandoned_) api().ucp_worker_destroy(worker);
}

// The descriptors go last: until here another thread may still kick.
Endpoint::~Endpoint() {
  if (fork_.forked()) {  // the thread lives in the parent, as all of UCX does
    new std::thread(std::move(thread_));
    static_cast<void>(new std::shared_ptr<Context>(std::move(context_)));
    static_cast<void>(new std::set<uint64_t>(std::move(under_way_)));
    static_cast<void>(new std::deque<std::unique_ptr<Flush>>(std::move(flushed_)));
    return;
  }
  end();
  int socket = socket_.load(std::memory_order_acquire);
  if (socket >= 0) ForkGuard::forget(socket);
  for (int fd : {socket, kick_fd_, poll_fd_})
    if (fd >= 0) ::close(fd);
}

}  // namespace tapchannel::ucx
