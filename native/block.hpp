// A mapped control block: typed access, bells, the flight recorder.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <functional>
#include <new>
#include <vector>

#include "control_block.hpp"
#include "mapping.hpp"

namespace tapchannel {

inline uint64_t now_ns() {
  timespec at{};
  clock_gettime(CLOCK_MONOTONIC, &at);
  return static_cast<uint64_t>(at.tv_sec) * 1000000000ULL + static_cast<uint64_t>(at.tv_nsec);
}

// Seconds since a heartbeat; -1 where there was none.
inline double seconds_since(uint64_t then) {
  return then == 0 ? -1 : static_cast<double>(now_ns() - then) / 1e9;
}

inline void sleep_ns(uint64_t ns) {
  timespec span{static_cast<time_t>(ns / 1000000000ULL), static_cast<long>(ns % 1000000000ULL)};
  nanosleep(&span, nullptr);
}

inline void ring(Bell& bell) {
  bell.count.fetch_add(1, std::memory_order_seq_cst);
  if (bell.sleepers.load(std::memory_order_seq_cst) != 0)
    syscall(SYS_futex, &bell.count, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

// A sleep and its wake-up cost both sides more than this: what comes sooner is met awake. By
// yielding, so that whoever else can run on this core goes first.
constexpr uint64_t kAwake = 50000ULL;  // 50 us

template <class Ready>
bool met_awake(uint64_t ns, Ready&& ready) {
  for (uint64_t until = now_ns() + ns; now_ns() < until; sched_yield())
    if (ready()) return true;
  return ready();  // the last yield may have taken long
}

// Sleeps until the bell rings or `ns` have passed, the first `awake_ns` of them awake; `ready` is
// the last look, taken after the sleeper has announced itself.
template <class Ready>
void sleep_on(Bell& bell, uint64_t ns, Ready&& ready, uint64_t awake_ns = 0) {
  if (awake_ns != 0 && met_awake(std::min(ns, awake_ns), ready)) return;
  bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
  uint32_t seen = bell.count.load(std::memory_order_seq_cst);
  if (!ready()) {
    timespec span{static_cast<time_t>(ns / 1000000000ULL), static_cast<long>(ns % 1000000000ULL)};
    syscall(SYS_futex, &bell.count, FUTEX_WAIT, seen, &span, nullptr, 0);
  }
  bell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

// Counts waiting time in slices, each capped: time for which this process was stopped (SIGSTOP, a
// suspended machine) does not count as waiting, so that a deadline is never judged on news that
// nobody could have read.
class Patience {
 public:
  explicit Patience(double limit_s)
      : limit_(static_cast<uint64_t>(limit_s * 1e9)), last_(now_ns()) {}
  void tick() {
    uint64_t at = now_ns();
    waited_ += std::min(at - last_, kSlice);
    last_ = at;
  }
  bool over() const { return waited_ >= limit_; }
  uint64_t left_ns() const { return waited_ >= limit_ ? 0 : limit_ - waited_; }
  double waited_s() const { return static_cast<double>(waited_) / 1e9; }
  double limit_s() const { return static_cast<double>(limit_) / 1e9; }

 private:
  static constexpr uint64_t kSlice = 100000000ULL;
  uint64_t limit_, last_, waited_ = 0;
};

// A host wait asks now and then whether its caller was interrupted (Ctrl-C). Never asked under a
// lock.
class Interrupt {
 public:
  using Ask = std::function<bool()>;
  using AskPlain = bool (*)();
  explicit Interrupt(Ask ask) : ask_(std::move(ask)), asked_at_(now_ns()) {}
  bool happened() {
    if (!ask_ || now_ns() - asked_at_ < kEvery) return false;
    asked_at_ = now_ns();
    return ask_();
  }

 private:
  static constexpr uint64_t kEvery = 50000000ULL;
  Ask ask_;
  uint64_t asked_at_;
};

class ControlBlock {
 public:
  ControlBlock() = default;
  static ControlBlock create(const std::string& name, uint32_t lane, uint32_t depth, uint32_t cells,
                             const std::array<uint8_t, 16>& id) {
    ControlBlock made;
    made.layout_ = BlockLayout{depth, cells};
    made.memory_ = Mapping::create(
        name, made.layout_.bytes());  // a new memfd reads as zero: every word starts at "nothing"
    auto* header = new (made.memory_.base())
        BlockHeader{0, kLayoutVersion, lane, depth, cells, made.layout_.bytes(), {}};
    std::copy(id.begin(), id.end(), header->mailbox_id);
    std::atomic_thread_fence(std::memory_order_release);
    header->magic = kMagic;
    return made;
  }
  static ControlBlock adopt(int fd, uint32_t lane, uint32_t depth, uint32_t cells,
                            const std::array<uint8_t, 16>& id) {
    if (depth == 0 || depth > kMaxDepth || cells > kMaxCells) {
      close(fd);
      throw std::invalid_argument("control block with an impossible depth or cell count");
    }
    ControlBlock made;
    made.layout_ = BlockLayout{depth, cells};
    made.memory_ = Mapping::adopt(fd, made.layout_.bytes());
    const auto* header = reinterpret_cast<const BlockHeader*>(made.memory_.base());
    if (header->magic != kMagic || header->version != kLayoutVersion || header->lane != lane ||
        header->depth != depth || header->cells != cells ||
        header->total_bytes != made.layout_.bytes() ||
        !std::equal(id.begin(), id.end(), header->mailbox_id))
      throw std::invalid_argument("control block header does not match the descriptor");
    return made;
  }
  ConsumerWords& consumer() const { return at<ConsumerWords>(layout_.consumer()); }
  ProducerWords& producer() const { return at<ProducerWords>(layout_.producer()); }
  std::atomic<uint64_t>& stamp(size_t slot, size_t cell) const {
    return at<std::atomic<uint64_t>>(layout_.stamps() +
                                     (slot * layout_.cells + cell) * sizeof(uint64_t));
  }
  Announce& announce(size_t slot, size_t cell) const {
    return at<Announce>(layout_.announces() + (slot * layout_.cells + cell) * sizeof(Announce));
  }
  Ring& consumer_ring() const { return at<Ring>(layout_.consumer_ring()); }
  Ring& producer_ring() const { return at<Ring>(layout_.producer_ring()); }
  size_t cells() const { return layout_.cells; }
  size_t depth() const { return layout_.depth; }
  Mapping& memory() { return memory_; }
  const Mapping& memory() const { return memory_; }
  size_t offset_of(const void* word) const {
    return static_cast<size_t>(static_cast<const uint8_t*>(word) - memory_.base());
  }

 private:
  template <class T>
  T& at(size_t offset) const {
    return *reinterpret_cast<T*>(memory_.base() + offset);
  }
  BlockLayout layout_{0, 0};
  Mapping memory_;
};

inline void record(Ring& ring, Step step, uint64_t key, size_t cell, uint64_t bytes) {
  // relaxed: the number only hands out places in this process's own ring
  uint64_t number = ring.next.value.fetch_add(1, std::memory_order_relaxed);
  Event& event = ring.entries[number % kRingEntries];
  event.number.store(0, std::memory_order_release);
  event.time_ns = now_ns();
  event.key = key;
  event.bytes = bytes;
  event.step = static_cast<uint16_t>(step);
  event.cell = static_cast<uint16_t>(cell);
  event.number.store(static_cast<uint32_t>(number) + 1, std::memory_order_release);
}

struct EventFacts {
  uint64_t number, time_ns, key, bytes;
  uint16_t step, cell;
};

// The ring's last events, oldest first. Others write it while it is read: an entry whose number
// changed meanwhile is left out.
inline std::vector<EventFacts> read_ring(const Ring& ring) {
  std::vector<EventFacts> events;
  uint64_t next = ring.next.value.load(std::memory_order_acquire);
  for (uint64_t number = next > kRingEntries ? next - kRingEntries : 0; number < next; ++number) {
    const Event& entry = ring.entries[number % kRingEntries];
    uint32_t before = entry.number.load(std::memory_order_acquire);
    EventFacts event{number, entry.time_ns, entry.key, entry.bytes, entry.step, entry.cell};
    if (before == static_cast<uint32_t>(number) + 1 &&
        entry.number.load(std::memory_order_acquire) == before)
      events.push_back(event);
  }
  return events;
}

// relaxed: the aborted word that is stored next (release) and loaded before (acquire) orders the
// text; what a later abort writes meanwhile may tear it, which a text may be.
inline void write_text(Text& text, const std::string& words) {
  size_t length = std::min(words.size(), kTextBytes);
  text.length.store(static_cast<uint32_t>(length), std::memory_order_relaxed);
  for (size_t i = 0; i < length; ++i) text.bytes[i].store(words[i], std::memory_order_relaxed);
}
inline std::string read_text(const Text& text) {
  std::string words(std::min<size_t>(text.length.load(std::memory_order_relaxed), kTextBytes), 0);
  for (size_t i = 0; i < words.size(); ++i)
    words[i] = text.bytes[i].load(std::memory_order_relaxed);
  return words;
}

}  // namespace tapchannel
