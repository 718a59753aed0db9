#include "copy_streams.hpp"
#include "ucx_transport.hpp"

namespace tapchannel::ucx {

using namespace cuda;

namespace {
constexpr size_t kBuffers = 8;
constexpr size_t kBufferBytes = 1 << 20;
constexpr uint64_t kNap = 20000;
}  // namespace

// Pinned buffers that rows cross on their way from a GPU to the network.
class UcxGpuTransport::Ring : public std::enable_shared_from_this<Ring> {
 public:
  explicit Ring(Device device) : device_(std::move(device)), busy_(kBuffers), pages_(kBuffers) {}

  // A buffer that nobody reads any more, or null while there is none. It comes back when the last
  // put that reads it lets go.
  std::shared_ptr<uint8_t> take(size_t bytes) {
    for (size_t i = 0; i < kBuffers; ++i) {
      if (busy_[i].load(std::memory_order_acquire)) continue;
      if (!pages_[i] || pages_[i]->bytes() < bytes)
        pages_[i] = std::make_unique<PinnedPage>(device_, std::max(bytes, kBufferBytes));
      busy_[i].store(true, std::memory_order_relaxed);  // taken by one thread only
      return {pages_[i]->host(), [ring = shared_from_this(), i](uint8_t*) {
                ring->busy_[i].store(false, std::memory_order_release);
              }};
    }
    return nullptr;
  }

 private:
  Device device_;
  std::vector<std::atomic<bool>> busy_;
  std::vector<std::unique_ptr<PinnedPage>> pages_;
};

UcxGpuTransport::UcxGpuTransport(std::shared_ptr<Link> link, size_t cells, const Device& device,
                                 bool ucx_reads_gpu)
    : UcxTransport(std::move(link), cells),
      device_(device),
      events_(device),
      ucx_reads_gpu_(ucx_reads_gpu),
      ring_(std::make_shared<Ring>(device)) {
  ContextGuard guard(device_);
  check(driver()->cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
}

UcxGpuTransport::~UcxGpuTransport() {
  link().end();  // nothing of ours is read after it
  try {
    ContextGuard guard(device_);
    static_cast<void>(driver()->cuStreamDestroy(stream_));
  } catch (const std::exception&) {  // the driver is shutting down: nothing left to free
  }
}

// Bounded by the link's own deadline and by close(): a kernel before the tap may run for long.
void UcxGpuTransport::await(const std::function<CUresult()>& query, const char* call) {
  CUresult answer = query();
  for (; answer == CUDA_ERROR_NOT_READY; answer = query()) {
    if (cancelled_.load(std::memory_order_acquire))
      throw std::runtime_error("the outbox was closed while a push waited for its stream");
    sleep_ns(kNap);
  }
  check(answer, call);
}

void UcxGpuTransport::put(Token token, const Source& source, const Place& to,
                          const CellGeometry& cell) {
  await_cell(to);
  ContextGuard guard(device_);
  if (auto* event = static_cast<CUevent>(token); event != nullptr) {
    await([event] { return driver()->cuEventQuery(event); }, "cuEventQuery");
    forget(token);
  }
  if (ucx_reads_gpu_)
    link().put_rows(source, to, cell, nullptr);
  else
    put_by_ring(source, to, cell);
}

void UcxGpuTransport::put_by_ring(const Source& source, const Place& to, const CellGeometry& cell) {
  size_t at_once = std::max<size_t>(1, kBufferBytes / cell.row_bytes);
  for (size_t row = 0; row < source.rows; row += at_once) {
    size_t rows = std::min(at_once, source.rows - row);
    std::shared_ptr<uint8_t> buffer;
    while (!(buffer = ring_->take(rows * cell.row_bytes))) {
      if (!link().failure().empty()) return;  // no put will give a buffer back, nor take this one
      sleep_ns(kNap);
    }
    Rows from{reinterpret_cast<CUdeviceptr>(source.data + row * source.pitch), nullptr,
              source.pitch};
    Rows by{reinterpret_cast<CUdeviceptr>(buffer.get()), buffer.get(), cell.row_bytes};
    enqueue_rows(by, from, cell.row_bytes, rows, stream_);
    await([this] { return driver()->cuStreamQuery(stream_); }, "cuStreamQuery");
    Place there = to;
    there.offset += row * cell.pitch;
    link().put_rows({buffer.get(), rows, cell.row_bytes}, there, cell, buffer);
  }
}

}  // namespace tapchannel::ucx
