// cuda_ipc and host_staged on a producer's GPU: the copy engine moves the bytes, into the
// consumer's GPU memory or into staging memory of the host; the word that says so follows on the
// same stream.
#pragma once

#include "copy_streams.hpp"
#include "cuda_events.hpp"
#include "transport.hpp"

namespace tapchannel {

// Where a lane's copies go. `host` is set for staging memory; `address` is the GPU's name for it.
struct CopyTarget {
  cuda::CUdeviceptr address = 0;
  uint8_t* host = nullptr;
  std::shared_ptr<const void> owner;
};

// What this wire writes behind a payload, one word a slot and cell: the lane's stamps themselves,
// or its arrival words. `address` is the GPU's name for the first.
struct WordHome {
  cuda::CUdeviceptr address = 0;
  std::shared_ptr<const void> owner;
};

// Ordering rule: copy, then cuStreamWriteValue64 on the same copy stream; its default fence
// orders the copy before the word at system scope. Never payload and word in one batch call:
// members of a batch have no order.
class CudaTransport final : public Transport {
 public:
  CudaTransport(cuda::Device device, CopyTarget target, WordHome words);
  ~CudaTransport() override;
  void enter_thread() override;
  Token order(uintptr_t stream) override;
  void forget(Token token) override;
  void put(Token token, const Source& source, const Place& to, const CellGeometry& cell) override;
  void put_poison(const Place& to, size_t rows, const CellGeometry& cell) override;
  void stamp(const Mark& mark, const Place& at) override;
  void mark() override { streams_->mark(); }
  uint64_t performed() const override { return streams_->performed(); }
  bool finish(uint64_t limit_ns) override { return streams_->finish(limit_ns); }
  bool immediate() const override { return false; }
  bool in_call() const override { return true; }
  bool announces_ahead() const override { return false; }

 private:
  cuda::Device device_;
  CopyTarget target_;
  WordHome words_;
  cuda::Events events_;
  std::unique_ptr<cuda::CopyStreams> streams_;
};

// cuda_ipc: straight into the slots, and the stamps themselves.
std::unique_ptr<Transport> cuda_ipc_transport(const std::shared_ptr<cuda::DeviceArena>& arena,
                                              const ControlBlock& block);

}  // namespace tapchannel
