// The producer's core: one lane. push (steps 2 to 6), the bounded queue, and the progress thread
// that drains it.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "fork_guard.hpp"
#include "transport.hpp"
#include "verdict.hpp"

namespace tapchannel {

struct Push {
  uint64_t microbatch = 0;
  uint32_t cell = 0;
  Source source;
  uint64_t row_begin = 0;
  uintptr_t stream = 0;
  uint32_t ndim = 0;
  uint64_t shape[kMaxDims]{};
  uint32_t checksum = 0;
  bool checksummed = false;
  void* owner = nullptr;  // keeps the source alive; given back through take_retired()
  int64_t version = -1;   // the source's in-place version at push time; -1: not to be checked
};

struct Retired {
  void* owner;
  int64_t version;
  uint64_t key;
  uint32_t cell;
};

struct OutboxCounters {
  uint64_t pushes = 0, bytes = 0, deferred = 0, dropped = 0, queued = 0, queued_peak = 0;
  double credit_wait_s = 0;
};

class OutboxCore {
 public:
  OutboxCore(ControlBlock block, std::unique_ptr<Transport> transport,
             std::vector<CellGeometry> cells, uint64_t slot_bytes, bool drop_newest,
             size_t queue_limit, double timeout_s, double credit_wait_s, int socket);
  ~OutboxCore();
  OutboxCore(const OutboxCore&) = delete;

  Verdict open_pass(uint64_t step, uint64_t microbatches);
  Verdict close_pass();
  // Never makes a stream wait, and waits for credit only where the copy is merely enqueued: see
  // await_credit. On any fault nothing was announced, put or queued.
  Verdict push(const Push& push, Interrupt::AskPlain interrupted);
  Verdict flush(double timeout_s, const Interrupt::Ask& interrupted);
  void abort(const std::string& reason);
  // Ends the thread, waits (bounded) for the copies in flight, tells the consumer, closes the
  // socket. Twice is fine.
  void close();
  void modified(const Retired& source);  // a source changed in place before its copy was done

  // Sources that no copy reads any more. attempt: give up rather than wait for the lock.
  std::vector<Retired> take_retired(bool attempt);
  // Starts the progress thread. `on_retired` runs on it, without any lock, when sources can be let
  // go.
  void start(std::function<void()> on_retired);
  OutboxCounters counters();
  // Waits until what this side has said stands in the consumer's own control block.
  bool carried(uint64_t limit_ns);
  bool has_credit(uint64_t microbatch);  // of the open pass
  Verdict check();                       // the lane's standing fault, if any
  ControlBlock& block() { return block_; }

 private:
  struct Pending {
    Push push;
    uint64_t key;
    Transport::Token token;
    bool dropped;
    uint64_t queued_at;
    bool waits = false;  // for credit; otherwise for our thread alone
  };
  struct InFlight {
    uint64_t number;
    size_t slot;
    Retired source;
  };
  Verdict check_push(const Push& push);
  Verdict check_peer();
  Verdict check_delivered();
  Verdict over(uint64_t key) const;
  bool credit_covers(uint64_t key) const;
  void tell();
  void announce(const Pending& pending, size_t slot, uint64_t bytes);
  void send(const Pending& pending);
  void sent(const Pending& pending, bool in_call);
  Verdict await_credit(std::unique_lock<std::mutex>& lock, const Push& push, uint64_t key,
                       Interrupt::AskPlain interrupted);
  Verdict queue_full(const Push& push, uint64_t key) const;
  void send_now(const Pending& pending);
  void enqueue(const Pending& pending, bool credit);
  bool take_covered(Pending& next);
  void drain(std::unique_lock<std::mutex>& lock);
  void device_failed(const std::string& reason);
  void drop_queue(const std::function<bool(uint64_t key)>& over);
  void reap();
  void fail(Verdict verdict, const std::string& reason);
  void abort_pass(uint64_t pass, const std::string& reason);
  void watch_queue();
  bool gone() const;
  void watch_peer();
  void progress();
  uint64_t pass() const { return make_stamp(epoch_, step_, 0) >> kMicrobatchBits; }

  ForkGuard fork_;
  ControlBlock block_;
  std::unique_ptr<Transport> transport_;
  std::vector<CellGeometry> cells_;
  uint64_t slot_bytes_;
  bool drop_newest_;
  size_t queue_limit_;
  double timeout_s_;
  double credit_wait_s_;
  int socket_;

  std::mutex mutex_;
  std::condition_variable drained_;
  bool open_ = false;
  bool closed_ = false;
  bool draining_ = false;
  uint64_t epoch_ = 0, step_ = 0, microbatches_ = 0;
  int64_t last_step_ = -1;
  uint64_t pushed_count_ = 0, sent_count_ = 0, undelivered_ = 0;
  std::vector<bool> pushed_;
  std::deque<Pending> queue_;
  size_t waiting_ = 0;      // of the queue, those that wait for credit: the limit is theirs
  Patience queue_wait_{0};  // since a queued push was last sent, or the queue was last empty
  std::deque<InFlight> in_flight_;
  std::vector<Retired> retired_;
  uint64_t issued_ = 0, aborts_ = 0;
  Verdict failure_;
  Verdict dropped_;  // why queued pushes of the pass were dropped by the other side
  OutboxCounters counters_;
  std::function<void()> on_retired_;
  Bell idle_bell_;  // private: wakes our thread while nothing is queued; credit need not
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace tapchannel
