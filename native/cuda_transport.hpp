// cuda_ipc: the copy engine moves the bytes into the consumer's GPU memory; the stamp follows on
// the same stream.
#pragma once

#include <mutex>
#include <vector>

#include "cuda_memory.hpp"
#include "transport.hpp"

namespace tapchannel {

// Ordering rule: copy, then cuStreamWriteValue64 on the lane's one copy stream; its default fence
// orders the copy before the stamp at system scope. Never payload and stamp in one batch call:
// members of a batch have no order.
class CudaTransport final : public Transport {
 public:
  CudaTransport(cuda::Device device, std::shared_ptr<cuda::DeviceArena> arena,
                const ControlBlock& block);
  ~CudaTransport() override;
  void enter_thread() override;
  Token order(uintptr_t stream) override;
  void forget(Token token) override;
  void put(Token token, const Source& source, uint64_t offset, const CellGeometry& cell) override;
  void put_poison(uint64_t offset, size_t rows, const CellGeometry& cell) override;
  void stamp(std::atomic<uint64_t>& word, uint64_t value) override;
  void mark() override;
  uint64_t performed() const override;
  bool finish(uint64_t limit_ns) override;
  bool immediate() const override { return false; }

 private:
  cuda::CUevent take_event();
  cuda::Device device_;
  std::shared_ptr<cuda::DeviceArena> arena_;
  const uint8_t* block_base_;
  cuda::RegisteredHost registered_;
  // performed: one private word, written by the copy stream behind the stamps, when asked by
  // mark().
  //   writer the GPU; reader this process; order: stream order behind the stamp, load acquire;
  //   visible: the copies have read their sources. Without it close() could not tell when nothing
  //   is in flight, and a poisoned stamp would hide a copy's end.
  cuda::PinnedPage performed_;
  cuda::CUstream stream_ = nullptr;
  std::mutex mutex_;  // over the three below
  std::vector<cuda::CUevent> events_;
  uint64_t stamped_ = 0, marked_ = 0;
};

}  // namespace tapchannel
