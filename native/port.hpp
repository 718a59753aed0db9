// The consumer's seam: how its memory is waited for, read and given back.
#pragma once

#include <cstdint>
#include <vector>

#include "passage.hpp"

namespace tapchannel {

struct Region {  // one cell in the arena
  uint64_t offset;
  size_t rows;
  CellGeometry cell;
};

enum class Given { performed, enqueued, refused };

class Port {
 public:
  virtual ~Port() = default;
  // Called once by the monitor before anything else, on its thread.
  virtual void enter_thread() {}
  virtual bool on_host()
      const = 0;  // reads are the host's: a wait is a host wait, a release is performed at once
  virtual uint8_t* base() const = 0;
  virtual int ordinal() const = 0;
  virtual bool capturing(uintptr_t stream) const = 0;
  // Step 7: the stream goes on once the cell's stamp has reached the key.
  virtual void wait(uintptr_t stream, size_t lane, const std::atomic<uint64_t>& stamp,
                    uint64_t key) = 0;
  // Step 9: `word` becomes `value` once all that is queued on the streams now has been performed;
  // with fill_bytes, the slot is first filled with the byte 0xff. Never throws; `refused` = not now
  // (a capture), try again.
  virtual Given release(const std::vector<uintptr_t>& streams, size_t word, uint64_t value,
                        uint64_t offset, uint64_t fill_bytes) noexcept = 0;
  virtual bool released(size_t word, uint64_t value) const = 0;
  virtual size_t release_words() const = 0;
  // Begins to fill cells with the poison pattern; `filled` says when it has been performed. Never
  // blocks: the driver may be stuck behind the very wait that is about to be poisoned (a kernel's
  // first launch loads its module, and waits for the GPU to drain).
  virtual uint64_t start_fill(std::vector<Region> regions) = 0;
  virtual bool filled(uint64_t job) const = 0;
  // How a gate brings what arrived in `staging` into the slots. The port outlives it.
  virtual std::unique_ptr<Passage> passage(std::shared_ptr<Mapping> staging) = 0;
};

class HostPort final : public Port {
 public:
  explicit HostPort(std::shared_ptr<Mapping> arena) : arena_(std::move(arena)) {}
  bool on_host() const override { return true; }
  uint8_t* base() const override { return arena_->base(); }
  int ordinal() const override { return 0; }
  bool capturing(uintptr_t) const override { return false; }
  void wait(uintptr_t, size_t, const std::atomic<uint64_t>&, uint64_t) override {}
  Given release(const std::vector<uintptr_t>&, size_t, uint64_t, uint64_t offset,
                uint64_t fill_bytes) noexcept override {
    std::memset(arena_->base() + offset, 0xff, fill_bytes);
    return Given::performed;
  }
  bool released(size_t, uint64_t) const override { return true; }
  size_t release_words() const override { return SIZE_MAX; }
  uint64_t start_fill(std::vector<Region> regions) override {
    for (const auto& region : regions)
      for (size_t row = 0; row < region.rows; ++row)
        std::memset(arena_->base() + region.offset + row * region.cell.pitch,
                    region.cell.poison_byte, region.cell.row_bytes);
    return 0;
  }
  bool filled(uint64_t) const override { return true; }
  std::unique_ptr<Passage> passage(std::shared_ptr<Mapping> staging) override {
    return std::make_unique<HostPassage>(arena_, std::move(staging));
  }

 private:
  std::shared_ptr<Mapping> arena_;
};

}  // namespace tapchannel
