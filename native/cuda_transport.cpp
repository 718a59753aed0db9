#include "cuda_transport.hpp"

namespace tapchannel {

using namespace cuda;

CudaTransport::CudaTransport(Device device, CopyTarget target, WordHome words)
    : device_(std::move(device)),
      target_(std::move(target)),
      words_(std::move(words)),
      events_(device_),
      streams_(std::make_unique<CopyStreams>(device_)) {}

void CudaTransport::enter_thread() { relax_capture_on_this_thread(); }

CudaTransport::~CudaTransport() {
  try {
    // Unmapping under a running copy would fault the whole context. Rather leak than that.
    if (!finish(10000000000ULL)) {
      new CopyTarget(target_);
      new WordHome(words_);
      static_cast<void>(streams_.release());
    }
  } catch (const std::exception&) {  // the driver is shutting down: nothing left to free
  }
}

Transport::Token CudaTransport::order(uintptr_t stream) { return events_.record(stream); }

void CudaTransport::forget(Token token) { events_.give_back(static_cast<CUevent>(token)); }

void CudaTransport::put(Token token, const Source& source, const Place& place,
                        const CellGeometry& cell) {
  ContextGuard guard(device_);
  CUstream stream = streams_->of(place.track);
  if (token != nullptr) {
    check(driver()->cuStreamWaitEvent(stream, static_cast<CUevent>(token), 0), "cuStreamWaitEvent");
    forget(token);
  }
  Rows from{reinterpret_cast<CUdeviceptr>(source.data), nullptr, source.pitch};
  Rows to{target_.address + place.offset,
          target_.host == nullptr ? nullptr : target_.host + place.offset, cell.pitch};
  enqueue_rows(to, from, cell.row_bytes, source.rows, stream);
}

void CudaTransport::put_poison(const Place& to, size_t rows, const CellGeometry& cell) {
  if (rows == 0 || cell.row_bytes == 0) return;
  ContextGuard guard(device_);
  check(driver()->cuMemsetD2D8Async(target_.address + to.offset, cell.pitch, cell.poison_byte,
                                    cell.row_bytes, rows, streams_->of(to.track)),
        "cuMemsetD2D8Async");
}

void CudaTransport::stamp(const Mark& mark, const Place& at) {
  ContextGuard guard(device_);
  streams_->write(at.track, words_.address + at.cell * sizeof(uint64_t), mark.key);
}

std::unique_ptr<Transport> cuda_ipc_transport(const std::shared_ptr<DeviceArena>& arena,
                                              const ControlBlock& block) {
  const Mapping& memory = block.memory();
  auto words = std::make_shared<RegisteredHost>(arena->device(), memory.base(), memory.bytes());
  CUdeviceptr stamps = words->device_pointer() + block.offset_of(&block.stamp(0, 0));
  return std::make_unique<CudaTransport>(arena->device(), CopyTarget{arena->ptr(), nullptr, arena},
                                         WordHome{stamps, std::move(words)});
}

}  // namespace tapchannel
