// Fork: threads and driver state do not cross it. A child must not use, close or signal what its
// parent owns, and it must not keep the parent's sockets open (a peer would never see the parent
// die).
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace tapchannel {

class ForkGuard {
 public:
  ForkGuard() : generation_(current().load()) {}
  bool forked() const { return generation_ != current().load(std::memory_order_acquire); }
  // Descriptors named here are closed in every forked child.
  static void close_in_child(int fd) {
    for (auto& place : places()) {
      int empty = -1;
      if (place.compare_exchange_strong(empty, fd)) return;
    }
  }
  static void forget(int fd) {
    for (auto& place : places()) {
      int expected = fd;
      if (place.compare_exchange_strong(expected, -1)) return;
    }
  }
  static void install() {
    static const bool once = [] {
      for (auto& place : places()) place.store(-1);
      pthread_atfork(nullptr, nullptr, [] {
        current().fetch_add(1);
        for (auto& place : places()) {
          int fd = place.exchange(-1);
          if (fd >= 0) close(fd);
        }
      });
      return true;
    }();
    (void)once;
  }

 private:
  static constexpr size_t kPlaces = 8192;
  static std::atomic<uint32_t>& current() {
    static std::atomic<uint32_t> generation{0};
    return generation;
  }
  static std::atomic<int> (&places()) [kPlaces] {
    static std::atomic<int> all[kPlaces];
    return all;
  } uint32_t generation_;
};

}  // namespace tapchannel
