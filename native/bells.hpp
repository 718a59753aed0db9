// Sleeping on several bells at once.
#pragma once

#include <vector>

#include "block.hpp"

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif

namespace tapchannel {

class Bells {
 public:
  static constexpr size_t kMost = 128;  // the kernel's limit

  void clear() {
    waited_.clear();
    bells_.clear();
  }
  // Remembers the bell's count: to be called before the look that decides whether to sleep.
  void add(Bell& bell) {
    constexpr uint32_t kFutex32 = 2;  // shared between processes
    waited_.push_back({bell.count.load(std::memory_order_seq_cst),
                       reinterpret_cast<uint64_t>(&bell.count), kFutex32, 0});
    bells_.push_back(&bell);
  }
  // Sleeps until one of them has rung since it was added, or `ns` have passed. False where that is
  // not possible (too many bells, a kernel before 5.16): nobody has slept.
  bool sleep(uint64_t ns) {
    if (waited_.size() > kMost) return false;
    for (Bell* bell : bells_) bell->sleepers.fetch_add(1, std::memory_order_seq_cst);
    uint64_t until = now_ns() + ns;
    timespec at{static_cast<time_t>(until / 1000000000ULL),
                static_cast<long>(until % 1000000000ULL)};
    long answer = syscall(SYS_futex_waitv, waited_.data(), waited_.size(), 0, &at, CLOCK_MONOTONIC);
    bool slept = answer >= 0 || (errno != ENOSYS && errno != EPERM);
    for (Bell* bell : bells_) bell->sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return slept;
  }

 private:
  struct Waited {  // the kernel's struct futex_waitv
    uint64_t value, address;
    uint32_t flags, reserved;
  };
  static_assert(sizeof(Waited) == 24);
  std::vector<Waited> waited_;
  std::vector<Bell*> bells_;
};

}  // namespace tapchannel
