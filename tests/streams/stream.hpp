// A GPU stream that moves only when it is told to: the consumer's seam without a GPU.
#pragma once

#include <sys/eventfd.h>
#include <sys/socket.h>

#include <cstdio>
#include <cstdlib>
#include <deque>

#include "mailbox.hpp"

namespace streams {

using namespace tapchannel;

constexpr uint64_t kBytes = 8;  // of a slot: one cell, one row
constexpr std::array<uint8_t, 16> kId{7};

inline void must(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::exit(1);
}

class SteppedPort final : public Port {
 public:
  explicit SteppedPort(size_t depth) : arena_(depth * kBytes) {}
  bool on_host() const override { return false; }
  uint8_t* base() const override { return const_cast<uint8_t*>(arena_.data()); }
  int ordinal() const override { return 0; }
  bool capturing(uintptr_t) const override { return false; }
  void wait(uintptr_t, size_t, const std::atomic<uint64_t>& stamp, uint64_t key) override {
    std::lock_guard lock(mutex_);
    queue_.push_back({&stamp, key, 0});
  }
  Given release(const std::vector<uintptr_t>&, size_t word, uint64_t value, uint64_t,
                uint64_t) noexcept override {
    std::lock_guard lock(mutex_);
    queue_.push_back({nullptr, value, word});
    return Given::enqueued;
  }
  bool released(size_t word, uint64_t value) const override {
    std::lock_guard lock(mutex_);
    return words_[word] == value;
  }
  size_t release_words() const override { return kWords; }
  uint64_t start_fill(std::vector<Region> regions) override {
    for (const Region& region : regions) std::memset(base() + region.offset, 0xff, kBytes);
    return 0;
  }
  bool filled(uint64_t) const override { return true; }
  std::unique_ptr<Passage> passage(std::shared_ptr<Mapping>) override { return nullptr; }

  // Performs the next operation; false where it is a wait that goes on.
  bool step() {
    std::lock_guard lock(mutex_);
    if (queue_.empty()) return false;
    Operation next = queue_.front();
    if (next.stamp != nullptr && !landed(next.stamp->load(), next.value)) return false;
    if (next.stamp == nullptr) words_[next.word] = next.value;
    queue_.pop_front();
    return true;
  }
  size_t queued() const {
    std::lock_guard lock(mutex_);
    return queue_.size();
  }

 private:
  static constexpr size_t kWords = 64;
  struct Operation {
    const std::atomic<uint64_t>* stamp;  // null: a release
    uint64_t value;
    size_t word;
  };
  mutable std::mutex mutex_;
  std::deque<Operation> queue_;
  std::array<uint64_t, kWords> words_{};
  std::vector<uint8_t> arena_;
};

// A mailbox of one lane and one cell; the lane's words are written by hand.
class Channel {
 public:
  explicit Channel(size_t depth) {
    CellGeometry cell;
    cell.row_bytes = cell.pitch = kBytes;
    cell.row_limit = cell.tap_rows = 1;
    cell.dtype = 1;
    cell.width = kBytes;
    std::vector<ControlBlock> blocks;
    blocks.push_back(ControlBlock::create("streams", 0, static_cast<uint32_t>(depth), 1, kId));
    auto port = std::make_unique<SteppedPort>(depth);
    port_ = port.get();
    core_ = std::make_unique<MailboxCore>(std::move(port), std::move(blocks),
                                          std::vector<std::vector<CellGeometry>>{{cell}}, depth,
                                          kBytes, false);
  }
  ~Channel() {
    core_->abort("the test is over");
    while (until([this] { return port_->step(); }, 0.2)) {
    }
    core_->close();
    end_peer();
  }

  void attach() {
    int ends[2];
    must(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "a socket pair can be had");
    peer_ = ends[1];
    life_ = eventfd(0, EFD_CLOEXEC);
    must(core_->attach(0, ends[0], dup(life_), false, false, nullptr) ==
             MailboxCore::Admission::free,
         "the lane attaches");
    core_->block(0).producer().state.value.store(static_cast<uint64_t>(LaneState::attached));
  }
  void kill() {  // the process is gone, and nothing was said
    uint64_t one = 1;
    must(write(life_, &one, sizeof(one)) == sizeof(one), "what stands for a pidfd turns readable");
    end_peer();
  }
  void open(uint64_t step, uint64_t microbatches) {
    step_ = step;
    must(!core_->open_pass(step, microbatches), "the pass opens");
  }
  uint64_t key(uint64_t microbatch) const {
    return make_stamp(core_->epoch(), step_, microbatch + 1);
  }
  // recv(microbatch, rows=1), on the stream.
  std::pair<Verdict, uint64_t> receive(uint64_t microbatch, double limit = 30) {
    RecvRequest request;
    request.microbatch = microbatch;
    request.timeout_s = limit;
    request.rows = 1;
    request.need_announces = false;
    return core_->recv(request);
  }
  uint64_t received(uint64_t microbatch) {
    auto [verdict, lease] = receive(microbatch);
    must(!verdict, "the microbatch is received");
    return lease;
  }
  void put(uint64_t key, uint8_t value) {
    size_t at = (count_of(key) - 1) % core_->depth();
    std::memset(port_->base() + at * kBytes, value, kBytes);
    Announce& said = core_->block(0).announce(at, 0);
    said.rows = 1;
    said.dtype = 1;
    said.ndim = 2;
    said.shape[0] = 1;
    said.shape[1] = kBytes;
    stamp(at).store(key);
    said.key.store(key);
  }
  std::atomic<uint64_t>& stamp(size_t slot) { return core_->block(0).stamp(slot, 0); }
  uint8_t byte(size_t slot) const { return port_->base()[slot * kBytes]; }
  MailboxCore& core() { return *core_; }
  SteppedPort& port() { return *port_; }
  // Polls: the monitor takes its time. False: it has not come.
  template <class Ready>
  static bool until(Ready&& ready, double limit = 10) {
    Patience patience(limit);
    while (!ready()) {
      patience.tick();
      if (patience.over()) return false;
      sleep_ns(100000);
    }
    return true;
  }

 private:
  void end_peer() {
    for (int* fd : {&peer_, &life_})
      if (*fd >= 0) ::close(std::exchange(*fd, -1));
  }

  SteppedPort* port_ = nullptr;
  std::unique_ptr<MailboxCore> core_;
  uint64_t step_ = 0;
  int peer_ = -1, life_ = -1;  // life_: its pidfd
};

}  // namespace streams
