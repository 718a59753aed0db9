// Step 4 on a GPU: an event recorded on the caller's stream, taken from a pool.
#pragma once

#include <mutex>
#include <vector>

#include "cuda_memory.hpp"

namespace tapchannel::cuda {

class Events {
 public:
  explicit Events(Device device) : device_(std::move(device)) {}
  ~Events();
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;
  // One event record is all that a push costs the caller's stream (I5). Throws CapturingError.
  CUevent record(std::uintptr_t stream);
  // A wait captures the event's state when it is enqueued, so the event may be recorded anew at
  // once.
  void give_back(CUevent event);

 private:
  CUevent take();
  Device device_;
  std::mutex mutex_;  // over the pool
  std::vector<CUevent> pool_;
};

}  // namespace tapchannel::cuda
