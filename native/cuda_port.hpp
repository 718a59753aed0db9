// The consumer's seam on a GPU: stream waits on registered host words, release in stream order.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "cuda_passage.hpp"
#include "port.hpp"

namespace tapchannel {

class CudaPort final : public Port {
 public:
  CudaPort(cuda::Device device, std::shared_ptr<cuda::DeviceArena> arena,
           const std::vector<ControlBlock*>& blocks);
  ~CudaPort() override;
  void enter_thread() override;
  bool on_host() const override { return false; }
  uint8_t* base() const override { return reinterpret_cast<uint8_t*>(arena_->ptr()); }
  int ordinal() const override { return device_.ordinal(); }
  bool capturing(uintptr_t stream) const override;
  void wait(uintptr_t stream, size_t lane, const std::atomic<uint64_t>& stamp,
            uint64_t key) override;
  Given release(const std::vector<uintptr_t>& streams, size_t word, uint64_t value, uint64_t offset,
                uint64_t fill_bytes) noexcept override;
  bool released(size_t word, uint64_t value) const override;
  size_t release_words() const override { return kReleaseWords; }
  uint64_t start_fill(std::vector<Region> regions) override;
  bool filled(uint64_t job) const override;
  std::unique_ptr<Passage> passage(std::shared_ptr<Mapping> staging) override;

 private:
  static constexpr size_t kReleaseWords = 16384;
  static constexpr size_t kPatternBytes = 1 << 20;
  void fill_region(const Region& region, uint64_t pattern);
  void fill(const std::vector<Region>& regions);
  void run_fills();
  cuda::Device device_;
  std::shared_ptr<cuda::DeviceArena> arena_;
  std::vector<RegisteredBlock> lanes_;
  // release words: private to this process.
  //   writer the GPU, behind the reads of the lease's streams (cuStreamWriteValue64); reader the
  //   monitor thread order  stream order and the default fence; load acquire; visible: the reads
  //   have been performed without it credit would go back under a reader (I2)
  cuda::PinnedPage words_;
  cuda::PinnedPage pattern_;  // first half 0xff, second half 0x80: the two poison patterns
  cuda::CUstream release_stream_ = nullptr;
  cuda::CUstream poison_stream_ = nullptr;
  cuda::CUevent event_ = nullptr;

  // Fills run on a thread of their own, which may get stuck in the driver; the monitor must not.
  std::mutex fill_mutex_;
  std::condition_variable fill_bell_;
  std::deque<std::vector<Region>> fills_;
  bool fill_stop_ = false;
  uint64_t fills_begun_ = 0;
  std::atomic<uint64_t> fills_done_{0};
  std::thread filler_;
};

}  // namespace tapchannel
