// One connection over UCX: a worker of its own, one endpoint, and the thread that progresses both.
//
// UCX reports no silent cut and, on some transports, no death: every operation has a deadline here,
// and an idle endpoint is probed by its owner's heartbeat.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "block.hpp"
#include "fork_guard.hpp"
#include "ucx_context.hpp"

namespace tapchannel::ucx {

class Endpoint {
 public:
  // The peer's control block; its arena, or staging memory; its arrival words, where it has a gate.
  using Regions = std::array<Region, 3>;
  using Then = std::function<void()>;
  // `limit_s`: how long an operation may stay without any progress before the peer counts as lost.
  Endpoint(std::shared_ptr<Context> context, double limit_s);
  virtual ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  const std::string& address() const { return address_; }
  // Connects to a peer's worker, and takes the keys of its regions.
  // Blocks:     never: what is put before the connection stands is sent once it does.
  void connect(const std::string& peer_address, const Regions& regions);
  // Puts bytes into the peer's arena and waits until they are performed there.
  // On failure: throws UcxError, also when `limit_s` ran out.
  void write(uint64_t offset, const std::string& bytes, double limit_s);
  // The same, `count` times over with one flush; gives the seconds.
  double measure(uint64_t offset, size_t bytes, size_t count, double limit_s);
  std::string failure() const;
  std::vector<std::string> transports() const;  // such as "tcp/eth0"
  bool one_sided() const { return one_sided_.load(std::memory_order_acquire); }
  void kick();
  void end() noexcept;

 protected:
  enum class Target : size_t { block, arena, words };
  void start();  // the thread; called once by the most derived constructor
  // All below: with mutex_ held.
  // A put's source must stay valid until `keep` goes, or until a later flush has ended.
  void put(const void* from, size_t bytes, Target target, uint64_t offset,
           std::shared_ptr<void> keep);
  // Runs `then` once all that was put before has been performed at the peer; never after a failure.
  void flush(Then then);
  void fail(const std::string& reason);
  bool has(Target target) const { return keys_[static_cast<size_t>(target)] != nullptr; }
  bool usable() const { return ep_ != nullptr && failure_.empty(); }
  size_t pending() const { return pending_; }

  // Called by the thread, with mutex_ held, each time round.
  virtual void look() {}
  // Called by the thread, without mutex_: something may have arrived.
  virtual void arrived() {}

  ForkGuard fork_;
  mutable std::mutex mutex_;
  std::atomic<int> socket_{-1};  // ours; shut down on failure

 private:
  struct Keep;
  struct Flush {
    Endpoint* endpoint;
    Then then;
    uint64_t behind;  // the last put before it
  };
  static void put_done(void* request, ucs_status_t status, void* user);
  static void flush_done(void* request, ucs_status_t status, void* user);
  static void peer_failed(void* user, ucp_ep_h ep, ucs_status_t status);
  void note_end();
  void make_worker();
  void make_wakeup();
  void watch(int fd) const;
  void completed(ucs_status_t status);
  void await_put(const std::shared_ptr<std::string>& source, uint64_t offset, size_t count,
                 double limit_s);
  void finish_put(uint64_t number, ucs_status_t status);
  void finish_flush(Flush* flush, ucs_status_t status);
  void run_flushed();
  void judge_deadline(bool moved);
  bool closing_aborts() const;
  void abandon() noexcept;
  void close_endpoint() noexcept;
  std::unique_ptr<cuda::ContextGuard> guard_or_none() const noexcept;
  void wait();
  void run();
  ucp_rkey_h unpack(const Region& region);
  std::vector<std::string> query_transports();

  std::shared_ptr<Context> context_;
  std::string address_;
  ucp_worker_h worker_ = nullptr;
  ucp_ep_h ep_ = nullptr;
  std::array<ucp_rkey_h, 3> keys_{};
  Regions regions_;
  std::vector<std::string> names_;
  std::string failure_;
  size_t pending_ = 0;
  uint64_t puts_ = 0;
  std::set<uint64_t> under_way_;                // puts that have not ended, by number
  std::deque<std::unique_ptr<Flush>> flushed_;  // ended, for UCX; in their order
  bool running_ = false;                        // what stands behind them
  double limit_s_;
  Patience patience_;
  std::atomic<bool> one_sided_{false};
  bool stands_ = false;     // the connection: a flush has come back over it
  bool abandoned_ = false;  // with mutex_ held
  int worker_fd_ = -1, kick_fd_ = -1, poll_fd_ = -1;
  std::atomic<bool> stop_{false};
  std::mutex end_mutex_;
  std::thread thread_;

 protected:
  void adopt_socket(int socket);  // duplicates it, and watches it for the peer's end
};

}  // namespace tapchannel::ucx
