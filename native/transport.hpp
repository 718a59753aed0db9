// The producer's seam: how a lane's bytes cross.
//
// The contract (DESIGN section 5): a stamp never becomes visible before the payload that it covers,
// and what one lane puts and stamps in one cell becomes visible in the order of the calls. put,
// put_poison and stamp come from one thread at a time; order, forget, mark and performed may come
// from another meanwhile.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>

#include "block.hpp"
#include "streaming_copy.hpp"

namespace tapchannel {

struct CapturingError : std::runtime_error {
  CapturingError() : std::runtime_error("a CUDA graph is being captured on this stream") {}
};

struct Source {
  const uint8_t* data = nullptr;
  size_t rows = 0;
  size_t pitch = 0;
};

struct Target {
  uint8_t* data = nullptr;
  size_t pitch = 0;
};

struct CellGeometry {
  uint64_t offset = 0;     // of row 0, in the slot
  uint64_t row_bytes = 0;  // this cell's share of a row
  uint64_t pitch = 0;      // from row to row in the slot
  uint64_t row_limit = 0;  // rows that this cell may hold
  uint64_t tap_rows = 0;   // rows that the whole tap may hold
  uint32_t dtype = 0;
  uint8_t poison_byte = 0xff;
  uint32_t tap = 0;         // index in the plan
  uint64_t width = 0;       // elements in this cell's share of a row
  bool counts_rows = true;  // one column share of each row share counts the tap's rows
};

// Where a put goes; its track, which all puts of one cell share and on which they keep their order;
// and which cell of which slot it is, counted through.
struct Place {
  uint64_t offset = 0;
  size_t track = 0;
  size_t cell = 0;
};

// What step 6 stores: the key, in the cell's stamp; where the consumer has its own control block,
// the announce goes with it.
struct Mark {
  std::atomic<uint64_t>& stamp;
  uint64_t key;
  const Announce& announce;
};

class Transport {
 public:
  virtual ~Transport() = default;
  using Token = void*;
  // Step 4: remembers where the caller's stream stands. The put that takes the token waits for that
  // point.
  virtual Token order(uintptr_t stream) = 0;
  virtual void forget(Token token) = 0;
  // Step 5: moves rows x row_bytes to `offset` in the arena; the destination's rows are `pitch`
  // apart. A null token: the source can be read at once.
  virtual void put(Token token, const Source& source, const Place& to,
                   const CellGeometry& cell) = 0;
  // Fills the cell with the dtype's poison pattern: the payload of a dropped tap.
  virtual void put_poison(const Place& to, size_t rows, const CellGeometry& cell) = 0;
  // Step 6: stores the stamp once everything put before has been performed at the consumer.
  virtual void stamp(const Mark& mark, const Place& at) = 0;
  // Asks the wire to say through performed() when all that was stamped so far has been performed.
  virtual void mark() = 0;
  // How many stamps are known to have been performed; their sources are free.
  virtual uint64_t performed() const = 0;
  // Waits until all that was put has been performed; false when the limit ran out first.
  virtual bool finish(uint64_t limit_ns) = 0;
  // Called once by the lane's own thread before anything else, on that thread.
  virtual void enter_thread() {}
  // True when put returns only after the source has been read.
  virtual bool immediate() const = 0;
  // True when a push with credit is sent by its caller's thread, false when only the lane's own
  // may.
  virtual bool in_call() const = 0;
  // True when the announce is to be written before the put (step 2). Where put and stamp are only
  // enqueued on a GPU it follows them: see OutboxCore::send.
  virtual bool announces_ahead() const = 0;

  // What a transport needs whose two sides do not map one control block; see LaneLink.
  virtual void begin(ControlBlock&, int /*socket*/) {}
  virtual void kick() {}
  // The outbox closes: a put that waits for the caller's stream gives up, and throws.
  virtual void cancel() {}
  virtual bool settle(uint64_t /*limit_ns*/) { return true; }
  virtual bool rings() const { return true; }
  virtual std::string failure() const { return {}; }
};

// Large copies leave the caches alone: finish_streaming() before the word that says "landed".
inline void copy_rows(const Target& to, const Source& from, size_t row_bytes) {
  constexpr size_t kStreamingRow = 512;
  bool large = from.rows * row_bytes >= kStreamingBytes && row_bytes >= kStreamingRow;
  auto copy = [large](uint8_t* target, const uint8_t* source, size_t bytes) {
    if (large)
      copy_streaming(target, source, bytes);
    else
      std::memcpy(target, source, bytes);
  };
  if (from.pitch == row_bytes && to.pitch == row_bytes) {
    copy(to.data, from.data, from.rows * row_bytes);
    return;
  }
  for (size_t row = 0; row < from.rows; ++row)
    copy(to.data + row * to.pitch, from.data + row * from.pitch, row_bytes);
}

// shm: payload stores, then a release store of the stamp. Ordering rule: x86-64 and C++
// release/acquire.
class ShmTransport : public Transport {
 public:
  explicit ShmTransport(std::shared_ptr<Mapping> arena) : arena_(std::move(arena)) {}
  Token order(uintptr_t) override { return nullptr; }
  void forget(Token) override {}
  void put(Token, const Source& source, const Place& place, const CellGeometry& cell) override {
    copy_rows({arena_->base() + place.offset, cell.pitch}, source, cell.row_bytes);
  }
  void put_poison(const Place& to, size_t rows, const CellGeometry& cell) override {
    for (size_t row = 0; row < rows; ++row)
      std::memset(arena_->base() + to.offset + row * cell.pitch, cell.poison_byte, cell.row_bytes);
  }
  void stamp(const Mark& mark, const Place&) override {
    finish_streaming();  // a release store alone does not order the streaming stores before it
    mark.stamp.store(mark.key, std::memory_order_release);
    performed_.fetch_add(1, std::memory_order_release);
  }
  void mark() override {}
  uint64_t performed() const override { return performed_.load(std::memory_order_acquire); }
  bool finish(uint64_t) override { return true; }
  bool immediate() const override { return true; }
  bool in_call() const override { return true; }
  bool announces_ahead() const override { return true; }

 private:
  std::shared_ptr<Mapping> arena_;
  std::atomic<uint64_t> performed_{0};
};

}  // namespace tapchannel
