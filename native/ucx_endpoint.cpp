#include "ucx_endpoint.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <sstream>

namespace tapchannel::ucx {

namespace {
// UCX parses a peer's address and keys without being told their length: behind a copy of them lie
// zeros, so that a length inside them cannot lead it out of this buffer.
constexpr size_t kPadding = 65536;

std::vector<char> padded(const std::string& bytes) {
  std::vector<char> made(bytes.size() + kPadding, 0);
  std::copy(bytes.begin(), bytes.end(), made.begin());
  return made;
}
}  // namespace

struct Endpoint::Keep {
  Endpoint* endpoint;
  std::shared_ptr<void> source;
  uint64_t number;
};

Endpoint::Endpoint(std::shared_ptr<Context> context, double limit_s)
    : context_(std::move(context)), limit_s_(limit_s), patience_(limit_s) {
  ForkGuard::install();
  auto guard = context_->enter();
  make_worker();
  try {
    make_wakeup();
  } catch (...) {
    api().ucp_worker_destroy(worker_);
    throw;
  }
}

void Endpoint::make_worker() {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  check(api().ucp_worker_create(context_->handle(), &params, &worker_), "ucp_worker_create");
  ucp_address_t* address = nullptr;
  size_t bytes = 0;
  ucs_status_t status = api().ucp_worker_get_address(worker_, &address, &bytes);
  if (status != UCS_OK) {
    api().ucp_worker_destroy(worker_);
    throw UcxError("ucp_worker_get_address", status);
  }
  address_.assign(reinterpret_cast<const char*>(address), bytes);
  api().ucp_worker_release_address(worker_, address);
}

void Endpoint::make_wakeup() {
  // Not every transport can wake: then the thread looks now and then instead.
  if (api().ucp_worker_get_efd(worker_, &worker_fd_) != UCS_OK) worker_fd_ = -1;
  kick_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  poll_fd_ = epoll_create1(EPOLL_CLOEXEC);
  if (kick_fd_ < 0 || poll_fd_ < 0) {
    for (int fd : {kick_fd_, poll_fd_})
      if (fd >= 0) ::close(fd);
    throw_errno("eventfd or epoll of a UCX endpoint");
  }
  watch(kick_fd_);
  if (worker_fd_ >= 0) watch(worker_fd_);
}

void Endpoint::watch(int fd) const {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  if (epoll_ctl(poll_fd_, EPOLL_CTL_ADD, fd, &event) != 0) throw_errno("epoll_ctl");
}

void Endpoint::adopt_socket(int socket) {
  int own = fcntl(socket, F_DUPFD_CLOEXEC, 3);
  if (own < 0) throw_errno("duplicating a lane's socket");
  ForkGuard::close_in_child(own);
  socket_.store(own, std::memory_order_release);
  watch(own);
}

void Endpoint::start() {
  thread_ = std::thread([this] { run(); });
}

ucp_rkey_h Endpoint::unpack(const Region& region) {
  if (region.key.empty()) return nullptr;
  std::vector<char> bytes = padded(region.key);
  ucp_rkey_h key = nullptr;
  check(api().ucp_ep_rkey_unpack(ep_, bytes.data(), &key), "ucp_ep_rkey_unpack");
  return key;
}

void Endpoint::connect(const std::string& peer_address, const Regions& regions) {
  auto guard = context_->enter();
  std::lock_guard lock(mutex_);
  if (ep_ != nullptr || !failure_.empty()) throw UcxError("endpoint is not to be connected now");
  std::vector<char> bytes = padded(peer_address);
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(bytes.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = &Endpoint::peer_failed;
  params.err_handler.arg = this;
  check(api().ucp_ep_create(worker_, &params, &ep_), "ucp_ep_create");
  regions_ = regions;
  for (size_t i = 0; i < regions_.size(); ++i) keys_[i] = unpack(regions_[i]);
  names_ = query_transports();
  kick();
}

void Endpoint::peer_failed(void* user, ucp_ep_h, ucs_status_t status) {
  static_cast<Endpoint*>(user)->fail("UCX reports the peer as gone: " + status_text(status));
}

void Endpoint::fail(const std::string& reason) {
  if (!failure_.empty()) return;
  failure_ = reason;
  int socket = socket_.load(std::memory_order_acquire);
  if (socket >= 0) shutdown(socket, SHUT_RDWR);  // both sides watch it
}

std::string Endpoint::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

void Endpoint::completed(ucs_status_t status) {
  --pending_;
  patience_ = Patience(limit_s_);
  if (status != UCS_OK && status != UCS_ERR_CANCELED) fail("UCX: " + status_text(status));
}

void Endpoint::put_done(void* request, ucs_status_t status, void* user) {
  std::unique_ptr<Keep> keep(static_cast<Keep*>(user));
  keep->endpoint->finish_put(keep->number, status);
  api().ucp_request_free(request);
}

void Endpoint::put(const void* from, size_t bytes, Target target, uint64_t offset,
                   std::shared_ptr<void> keep) {
  if (!usable()) return;
  const Region& region = regions_[static_cast<size_t>(target)];
  if (bytes > region.bytes || offset > region.bytes - bytes)
    return fail("a put would have left the peer's region");
  auto held = std::make_unique<Keep>(Keep{this, std::move(keep), ++puts_});
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = &Endpoint::put_done;
  param.user_data = held.get();
  if (pending_ == 0) patience_ = Patience(limit_s_);
  ++pending_;
  under_way_.insert(puts_);
  ucs_status_ptr_t request = api().ucp_put_nbx(ep_, from, bytes, region.address + offset,
                                               keys_[static_cast<size_t>(target)], &param);
  if (request != nullptr && !UCS_PTR_IS_ERR(request)) {
    static_cast<void>(held.release());  // put_done's
    return;
  }
  finish_put(held->number, request == nullptr ? UCS_OK : UCS_PTR_STATUS(request));
}

void Endpoint::finish_put(uint64_t number, ucs_status_t status) {
  completed(status);
  if (status != UCS_OK) return;  // it was never performed: nothing behind it may be
  under_way_.erase(number);
  run_flushed();
}

void Endpoint::flush_done(void* request, ucs_status_t status, void* user) {
  auto* flush = static_cast<Flush*>(user);
  flush->endpoint->finish_flush(flush, status);
  api().ucp_request_free(request);
}

void Endpoint::finish_flush(Flush* flush, ucs_status_t status) {
  std::unique_ptr<Flush> held(flush);
  completed(status);
  stands_ = stands_ || status == UCS_OK;
  if (status != UCS_OK) return;
  flushed_.push_back(std::move(held));
  run_flushed();
}

// UCX up to 1.19, or without its change 10991, ends a flush while its cuda_ipc still copies. There
// a put's own end says that it is done; over a network that says nothing. So it takes both.
void Endpoint::run_flushed() {
  if (running_) return;  // a `then` has put something that has ended already: the loop goes on
  running_ = true;
  while (!flushed_.empty() && failure_.empty()) {
    if (!under_way_.empty() && *under_way_.begin() <= flushed_.front()->behind) break;
    std::unique_ptr<Flush> next = std::move(flushed_.front());
    flushed_.pop_front();
    next->then();
  }
  running_ = false;
}

void Endpoint::flush(Then then) {
  if (!usable()) return;
  auto* made = new Flush{this, std::move(then), puts_};
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = &Endpoint::flush_done;
  param.user_data = made;
  if (pending_ == 0) patience_ = Patience(limit_s_);
  ++pending_;
  ucs_status_ptr_t request = api().ucp_ep_flush_nbx(ep_, &param);
  if (request == nullptr)
    finish_flush(made, UCS_OK);
  else if (UCS_PTR_IS_ERR(request))
    finish_flush(made, UCS_PTR_STATUS(request));
}

void Endpoint::write(uint64_t offset, const std::string& bytes, double limit_s) {
  await_put(std::make_shared<std::string>(bytes), offset, 1, limit_s);
}

double Endpoint::measure(uint64_t offset, size_t bytes, size_t count, double limit_s) {
  auto source = std::make_shared<std::string>(bytes, '\0');
  await_put(source, offset, 1, limit_s);  // the first pays for the connection
  uint64_t began = now_ns();
  await_put(source, offset, count, limit_s);
  return static_cast<double>(now_ns() - began) / 1e9;
}

void Endpoint::await_put(const std::shared_ptr<std::string>& source, uint64_t offset, size_t count,
                         double limit_s) {
  auto done = std::make_shared<std::atomic<bool>>(false);
  {
    auto guard = context_->enter();
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < count; ++i)
      put(source->data(), source->size(), Target::arena, offset, source);
    flush([done, source] { done->store(true, std::memory_order_release); });
  }
  kick();
  Patience patience(limit_s);
  while (!done->load(std::memory_order_acquire)) {
    std::string reason = failure();
    if (!reason.empty()) throw UcxError(reason);
    patience.tick();
    if (patience.over()) throw UcxError("the peer did not take a put in time");
    sleep_ns(50000);
  }
}

std::vector<std::string> Endpoint::transports() const {
  std::lock_guard lock(mutex_);
  return names_;
}

// ucp_ep_query tells the same from 1.14 on only. A line reads
// "#   lane[0]:  2:rc_verbs/mlx5_0:1.0 md[2] -> …".
std::vector<std::string> Endpoint::query_transports() {
  std::istringstream lines(printed([this](FILE* to) { api().ucp_ep_print_info(ep_, to); }));
  std::vector<std::string> names;
  bool one_sided = false;
  for (std::string line; std::getline(lines, line);) {
    size_t at = line.find("lane[");
    at = at == std::string::npos ? at : line.find_first_of("0123456789", line.find("]:", at));
    if (at == std::string::npos) continue;
    at = line.find(':', at) + 1;
    std::string name = line.substr(at, line.find_first_of(" \t", at) - at);
    name = name.substr(0, name.rfind('.'));  // which of the device's paths
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    // tcp moves bytes by the target's progress, which rings; all others write its memory.
    one_sided = one_sided || name.compare(0, 4, "tcp/") != 0;
  }
  one_sided_.store(one_sided, std::memory_order_release);
  return names;
}

void Endpoint::kick() {
  uint64_t one = 1;
  // A full counter means that a wake-up is due anyway.
  static_cast<void>(!::write(kick_fd_, &one, sizeof(one)));
}

}  // namespace tapchannel::ucx
