// The gate's seam: what has to be done between an arrival and its stamp.
#pragma once

#include "transport.hpp"

namespace tapchannel {

// A payload that has arrived, its announce checked: the rows fit the cell.
struct Arrival {
  size_t lane = 0;
  std::atomic<uint64_t>* stamp = nullptr;  // in the lane's control block
  uint64_t key = 0;
  uint64_t offset = 0;  // of its first row, in the staging memory and in the slots' arena alike
  size_t rows = 0;
  const CellGeometry* cell = nullptr;
  size_t track = 0;  // arrivals of one cell share a track, on which they keep their order
};

// All calls but `performed` come from the gate's own thread, and may throw what the driver answers.
class Passage {
 public:
  virtual ~Passage() = default;
  virtual void enter_thread() {}
  // Makes the payload readable in its slot and stores the stamp behind it (step 6). May only
  // enqueue the two; the stamp never becomes visible before the payload.
  virtual void let_through(const Arrival& arrival) = 0;
  // Asks to be told, through performed(), when all that was let through so far has been performed.
  virtual void mark() = 0;
  virtual uint64_t performed() const = 0;
};

// Both memories are this host's.
class HostPassage final : public Passage {
 public:
  HostPassage(std::shared_ptr<Mapping> arena, std::shared_ptr<Mapping> staging)
      : arena_(std::move(arena)), staging_(std::move(staging)) {}
  void let_through(const Arrival& arrival) override {
    const CellGeometry& cell = *arrival.cell;
    copy_rows({arena_->base() + arrival.offset, cell.pitch},
              {staging_->base() + arrival.offset, arrival.rows, cell.pitch}, cell.row_bytes);
    finish_streaming();
    arrival.stamp->store(arrival.key, std::memory_order_release);
    performed_.fetch_add(1, std::memory_order_release);
  }
  void mark() override {}
  uint64_t performed() const override { return performed_.load(std::memory_order_acquire); }

 private:
  std::shared_ptr<Mapping> arena_, staging_;
  std::atomic<uint64_t> performed_{0};
};

}  // namespace tapchannel
