// The consumer's core: credit (step 1), waits (step 7), leases (step 8), release (step 9), the
// monitor thread with its deadlines, poison, and the watch over the lanes.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "announce.hpp"
#include "fork_guard.hpp"
#include "gate.hpp"
#include "lane_link.hpp"
#include "port.hpp"
#include "verdict.hpp"

namespace tapchannel {

enum class WaitMode : int { attempt = 0, host = 1, stream = 2 };

struct RecvRequest {
  uint64_t microbatch = 0;
  WaitMode mode = WaitMode::stream;
  uintptr_t stream = 0;
  double timeout_s = 0;
  bool need_announces = true;  // false: the caller named the rows
  int64_t rows = -1;           // what it named
  Interrupt::Ask interrupted;
};

struct LaneCounters {
  uint64_t bytes = 0, messages = 0, dropped = 0;
  double wait_s = 0;
};

struct LaneStatus {
  bool attached = false, lost = false, revoked = false, ever = false, silent_known = false;
  double silent_s = -1;
  uint64_t attaches = 0;
  LaneCounters counters;
};

class MailboxCore {
 public:
  MailboxCore(std::unique_ptr<Port> port, std::vector<ControlBlock> blocks,
              std::vector<std::vector<CellGeometry>> cells, size_t depth, uint64_t slot_bytes,
              bool fill_released);
  ~MailboxCore();
  MailboxCore(const MailboxCore&) = delete;

  Verdict open_pass(uint64_t step, uint64_t microbatches);
  Verdict close_pass(double timeout_s, const Interrupt::Ask& interrupted);
  void abort(const std::string& reason);
  Verdict reset();  // a new life: epoch + 1, passes counted anew
  void close();

  // Steps 7 and 8. A refused recv has no side effect, except that a wait that failed fails the pass
  // (one verdict a key).
  std::pair<Verdict, uint64_t> recv(const RecvRequest& request);
  Verdict check_lease(uint64_t lease);  // the lease's own fault, if its wait failed
  Verdict settle(
      uint64_t lease, double timeout_s,
      const Interrupt::Ask& interrupted);  // host wait until a stream-waited lease has landed
  AnnounceFacts announce(size_t lane, size_t cell, uint64_t key);
  bool record_stream(uint64_t lease, uintptr_t stream);
  // Step 9, run by the storage's deleter: on any thread, without a Python lock, never throws, never
  // enqueues into a capture.
  void drop(uint64_t lease) noexcept;

  enum class Admission : int { free = 0, taken = 1, not_fenced = 2, closed = 3, revoked = 4 };
  Admission may_attach(size_t lane);
  // A producer's life on this lane begins. Takes both descriptors over; pidfd may be -1. `link`:
  // where its control block is another than ours. staged: its payload passes the gate.
  Admission attach(size_t lane, int socket, int pidfd, bool same_process, bool staged,
                   std::shared_ptr<LaneLink> link);
  void undo_attach(size_t lane);  // it did not go live
  // Takes the lane from whoever holds it. Nobody is let in again before the next reset.
  void revoke(size_t lane, const std::string& reason);
  LaneStatus lane_status(size_t lane);
  // Waits until what this side has said stands in every producer's own control block.
  bool carried(uint64_t limit_ns);

  // Lanes whose payload arrives in `staging` go through a gate, made by the first call; the memory
  // is laid out as the slots' arena. False once closed.
  bool open_gate(const std::shared_ptr<Mapping>& staging);
  // A new descriptor of the lane's arrival words, -1 once closed. Only with an open gate.
  int arrivals_fd(size_t lane, const std::string& name);

  Verdict check();
  ControlBlock& block(size_t lane) { return lanes_.at(lane).block; }
  Port& port() { return *port_; }
  uint64_t epoch();
  size_t depth() const { return depth_; }
  uint64_t slot_bytes() const { return slot_bytes_; }
  std::vector<Holder> holders();

 private:
  struct Lane {
    ControlBlock block;
    std::vector<CellGeometry> cells;
    bool attached = false, lost = false, revoked = false, ever = false, same_process = false,
         clean = false, staged = false;
    uint64_t barred_pass =
        ~0ULL;  // a lane that restarted in a pass cannot take part in the rest of it
    uint64_t attached_in_pass = ~0ULL;
    int socket = -1, pidfd = -1;
    uint64_t attaches = 0;
    LaneCounters counters;
    std::string why;                 // how the link ended, where one did, or why it was revoked
    std::shared_ptr<LaneLink> link;  // last: it ends before its words go
    bool rings() const { return !link || link->rings(); }
  };
  enum class Hold { held, dropped, releasing };
  struct LeaseRecord {
    uint64_t pass, microbatch, key;
    size_t slot, word;
    int64_t rows = -1;
    uint64_t fill = 0;  // the poison pattern's job, which must be performed before the slot is free
    Hold hold = Hold::held;
    bool waiting = false;
    bool doomed = false;    // its wait has failed, its poison is still to come
    bool poisoned = false;  // its wait has failed, its stream is let through by poison
    Patience patience{0};
    Verdict failure;
    std::vector<uintptr_t> streams;
  };
  enum class Received : uint8_t { no, leased, released };

  uint64_t pass() const { return make_stamp(epoch_, step_, 0) >> kMicrobatchBits; }
  Verdict standing() const;
  Verdict wait_granted(std::unique_lock<std::mutex>& lock, double timeout_s,
                       const Interrupt::Ask& interrupted);
  Verdict check_recv(const RecvRequest& request);
  std::vector<Holder> blockers(uint64_t microbatch, bool hard) const;
  Verdict lane_unmet(size_t index, const RecvRequest& request, uint64_t key, bool stamps);
  Verdict unmet(const RecvRequest& request, uint64_t key, bool stamps);
  Verdict given_up(uint64_t key);
  static bool gave_up(const ProducerWords& words, uint64_t pass);
  Verdict count_fault(size_t index, uint64_t key);
  Verdict lane_fault(Lane& lane, size_t index, uint64_t key);
  Verdict gate_fault(size_t index, size_t cell, size_t slot, uint64_t key);
  bool passed(size_t index, size_t cell, size_t slot, uint64_t key) const;
  bool underway(size_t index, size_t cell, size_t slot, uint64_t key) const;
  void end_lanes();
  void tell_gate();
  void leave_gate();
  Verdict rows_fault(uint64_t key, size_t slot, int64_t rows) const;
  Verdict bad_announce(const Lane& lane, size_t index, size_t slot, uint64_t key);
  Verdict host_wait(std::unique_lock<std::mutex>& lock, const RecvRequest& request, uint64_t key,
                    double& waited_s);
  uint64_t grant_lease(const RecvRequest& request, uint64_t key, double waited_s);
  bool poisoned(size_t slot) const;  // or about to be
  bool all_landed(uint64_t key, size_t slot) const;
  bool all_arrived(uint64_t key, size_t slot) const;
  void count_landed(uint64_t key, size_t slot, double waited_s);
  void sleep_for(std::unique_lock<std::mutex>& lock, const Verdict& want, uint32_t before,
                 uint64_t limit_ns, uint64_t& nap_ns);
  Verdict late(Verdict want, const Patience& patience);

  void advance();
  void strip_poison(size_t slot);
  void fail(uint64_t id, LeaseRecord& record, Verdict verdict);
  void fail_waits(size_t index);
  void doom(uint64_t id, LeaseRecord& record);
  void poison_if_due(uint64_t id, LeaseRecord& record);
  void poison(LeaseRecord& record);
  void poison_words(const LeaseRecord& record);
  void poison_the_rest();
  Verdict overwritten(const LeaseRecord& record) const;
  Verdict older_unmet();
  void give_back(uint64_t id, LeaseRecord& record);
  void store_lane_words(Lane& lane);
  static void tell(Lane& lane);
  static void detach(Lane& lane);
  void monitor(const std::shared_ptr<Port>& port);
  struct ReleaseWord {
    size_t word;
    uint64_t lease;
  };
  struct Ticked {
    bool pending;   // something is, that rings no bell
    bool released;  // a slot has come back
  };
  Ticked tick(bool watch, std::vector<ReleaseWord>& awaited);
  void watch_lane(Lane& lane);
  void watch_leases(std::vector<uint64_t>& released);
  size_t take_word();
  void end_pass(const std::string& reason);

  ForkGuard fork_;
  std::shared_ptr<Port> port_;
  std::vector<Lane> lanes_;
  std::mutex gate_mutex_;       // one gate is made; taken before mutex_
  std::unique_ptr<Gate> gate_;  // kept to the end; its thread ends in close()
  size_t depth_;
  uint64_t slot_bytes_;
  bool fill_released_;

  std::mutex mutex_;
  Bell bell_;         // private: wakes the monitor
  Bell credit_bell_;  // private: wakes host waits for credit
  bool closed_ = false, open_ = false;
  uint64_t epoch_ = 1, step_ = 0, microbatches_ = 0, granted_ = 0;
  int64_t last_step_ = -1;
  std::vector<Received> received_;
  Verdict failure_;
  std::map<uint64_t, LeaseRecord> leases_;
  uint64_t next_lease_ = 1;
  std::vector<size_t> free_words_;
  size_t words_used_ = 0;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace tapchannel
