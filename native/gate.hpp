// The gate: a thread of the consumer's between arrivals and stamps, for lanes whose payload cannot
// be read where it arrives.
//
//   lane ── put ──▶ staging cell, arrival word ──▶ gate ── copy ──▶ slot's cell, stamp ──▶ wait
//    ▲                                              ▲                                       │
//    └──────── grant (step 1) ◀─────────────────────┴─────────── release ◀───────── read ◀──┘
//
// Credit says which one key a slot may hold next, so a word of a dead pass, of a dead life of the
// lane, or of no key at all is never acted upon. The gate's copies of one cell leave on one stream
// in the order of the keys: a late one is always behind the newer one's place, never over it.
#pragma once

#include <mutex>
#include <string>
#include <thread>

#include "announce.hpp"
#include "arrivals.hpp"
#include "bells.hpp"
#include "passage.hpp"

namespace tapchannel {

class Gate {
 public:
  struct Served {  // a lane of the mailbox; both outlive the gate's thread
    ControlBlock* block;
    const std::vector<CellGeometry>* cells;
  };
  Gate(std::unique_ptr<Passage> passage, const std::vector<Served>& lanes, uint64_t slot_bytes);
  ~Gate();
  Gate(const Gate&) = delete;

  // The lane's arrival words, made on first use. Like begin and credit: one call at a time.
  Mapping& arrivals(size_t lane, const std::string& name);
  // A life of the lane begins that is staged; the lane is fenced, so nobody writes its words.
  void begin(size_t lane);
  // Ends what `begin` began. False while a copy of the lane is in flight, or about to be.
  bool fence(size_t lane);
  // (epoch, step, microbatches granted), 0: nothing is granted.
  void credit(uint64_t granted);

  // Copy and stamp of this key have been enqueued, or performed.
  bool passed(size_t lane, size_t slot, size_t cell, uint64_t key) const;
  // They will be, whatever becomes of the lane: its payload has arrived.
  bool underway(size_t lane, size_t slot, size_t cell, uint64_t key) const;
  // Why nothing passes any more; empty while all is well.
  std::string failure();
  // Ends the thread, and waits (bounded) for the copies in flight. Twice is fine.
  void close();
  // Leaves the thread to the parent process, whose it is.
  void leave_to_parent() { new std::thread(std::move(thread_)); }

 private:
  struct Lane {
    Served of;
    std::shared_ptr<Mapping> arrivals;
    std::atomic<bool> served{false};
    std::unique_ptr<std::atomic<uint64_t>[]> passed;  // the last key let through, a cell and slot
    uint64_t last = 0;  // number of the lane's last arrival that was let through
  };
  bool announced(const Lane& lane, size_t slot, size_t cell, uint64_t key) const;
  size_t index(const Lane& lane, size_t slot, size_t cell) const {
    return slot * lane.of.block->cells() + cell;
  }
  std::atomic<uint64_t>& arrival_of(const Lane& lane, size_t slot, size_t cell) const {
    return arrival(*lane.arrivals, index(lane, slot, cell));
  }
  bool arrived(const Lane& lane, size_t slot, size_t cell, uint64_t key) const;
  template <class Look>
  void each_due(Lane& lane, Look&& look) const;
  // What a look has found to be awaited.
  enum class Awaited { nothing, announce, payload };
  Awaited look();
  void sleep(Awaited awaited);
  bool let_through(size_t lane, size_t slot, size_t cell, uint64_t key);
  void run();

  std::unique_ptr<Passage> passage_;
  uint64_t slot_bytes_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::atomic<uint64_t> granted_{0};
  std::atomic<bool> failed_{false}, mark_wanted_{false}, stop_{false};
  Bell bell_;                              // private: wakes our thread when credit was given
  Bells bells_;                            // our thread's: that one, and those that the lanes ring
  uint64_t nap_ns_ = 0, awake_until_ = 0;  // our thread's
  // Held by our thread while it looks, also while it is stuck in the driver: everybody else tries.
  std::mutex looking_;
  uint64_t count_ = 0;  // arrivals let through so far
  std::string failure_;
  std::thread thread_;
};

}  // namespace tapchannel
