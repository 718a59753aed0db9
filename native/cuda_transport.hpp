// cuda_ipc: the copy engine moves the bytes into the consumer's GPU memory; the stamp follows on
// the same stream.
#pragma once

#include <array>
#include <mutex>
#include <vector>

#include "cuda_memory.hpp"
#include "transport.hpp"

namespace tapchannel {

// Ordering rule: copy, then cuStreamWriteValue64 on the same copy stream; its default fence
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
  void put(Token token, const Source& source, const Place& to, const CellGeometry& cell) override;
  void put_poison(const Place& to, size_t rows, const CellGeometry& cell) override;
  void stamp(const Mark& mark, const Place& at) override;
  void mark() override;
  uint64_t performed() const override;
  bool finish(uint64_t limit_ns) override;
  bool immediate() const override { return false; }
  bool announces_ahead() const override { return false; }

 private:
  cuda::CUevent take_event();
  cuda::CUstream stream_of(const Place& place) const { return streams_[place.track % kStreams]; }
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
  // Two copy streams, by track: the next message's copy runs while this one's stamp waits for its
  // fence. One cell always uses the same stream, so late puts of a dead pass stay before newer
  // ones.
  static constexpr size_t kStreams = 2;
  std::array<cuda::CUstream, kStreams> streams_{};
  std::mutex mutex_;  // over the three below
  std::vector<cuda::CUevent> events_;
  uint64_t stamped_ = 0, marked_ = 0;
};

}  // namespace tapchannel
