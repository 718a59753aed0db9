#include "cuda_transport.hpp"

namespace tapchannel {

using namespace cuda;

namespace {
CUstream as_stream(uintptr_t handle) { return reinterpret_cast<CUstream>(handle); }
}  // namespace

CudaTransport::CudaTransport(Device device, std::shared_ptr<DeviceArena> arena,
                             const ControlBlock& block)
    : device_(std::move(device)),
      arena_(std::move(arena)),
      block_base_(block.memory().base()),
      registered_(device_, block.memory().base(), block.memory().bytes()),
      performed_(device_, 4096) {
  std::memset(performed_.host(), 0, 4096);
  ContextGuard guard(device_);
  for (CUstream& stream : streams_)
    check(driver()->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
}

void CudaTransport::enter_thread() { relax_capture_on_this_thread(); }

CudaTransport::~CudaTransport() {
  try {
    // Unmapping under a running copy would fault the whole context. Rather leak than that.
    if (!finish(10000000000ULL)) new std::shared_ptr<DeviceArena>(arena_);
    ContextGuard guard(device_);
    for (CUevent event : events_) static_cast<void>(driver()->cuEventDestroy(event));
    for (CUstream stream : streams_) static_cast<void>(driver()->cuStreamDestroy(stream));
  } catch (const std::exception&) {  // the driver is shutting down: nothing left to free
  }
}

// Step 4: one event record is all that a push costs the caller's stream (I5).
Transport::Token CudaTransport::order(uintptr_t stream) {
  ContextGuard guard(device_);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  CUresult asked = driver()->cuStreamIsCapturing(as_stream(stream), &status);
  if (asked == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT ||
      (asked == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE))
    throw CapturingError();
  check(asked, "cuStreamIsCapturing");
  CUevent event = take_event();
  CUresult recorded = driver()->cuEventRecord(event, as_stream(stream));
  if (recorded != CUDA_SUCCESS) forget(event);
  check(recorded, "cuEventRecord");
  return event;
}

CUevent CudaTransport::take_event() {
  std::lock_guard lock(mutex_);
  CUevent event = nullptr;
  if (events_.empty()) {
    check(driver()->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    return event;
  }
  event = events_.back();
  events_.pop_back();
  return event;
}

// A wait captures the event's state when it is enqueued, so the event may be recorded anew at once.
void CudaTransport::forget(Token token) {
  std::lock_guard lock(mutex_);
  events_.push_back(static_cast<CUevent>(token));
}

void CudaTransport::put(Token token, const Source& source, const Place& place,
                        const CellGeometry& cell) {
  ContextGuard guard(device_);
  CUstream stream = stream_of(place);
  check(driver()->cuStreamWaitEvent(stream, static_cast<CUevent>(token), 0), "cuStreamWaitEvent");
  forget(token);
  CUdeviceptr to = arena_->ptr() + place.offset;
  auto from = reinterpret_cast<CUdeviceptr>(source.data);
  bool flat = (source.pitch == cell.row_bytes && cell.pitch == cell.row_bytes) || source.rows == 1;
  if (flat) {
    check(driver()->cuMemcpyDtoDAsync(to, from, source.rows * cell.row_bytes, stream),
          "cuMemcpyDtoDAsync");
    return;
  }
  CUDA_MEMCPY2D copy{};
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = from;
  copy.srcPitch = source.pitch;
  copy.dstDevice = to;
  copy.dstPitch = cell.pitch;
  copy.WidthInBytes = cell.row_bytes;
  copy.Height = source.rows;
  check(driver()->cuMemcpy2DAsync(&copy, stream), "cuMemcpy2DAsync");
}

void CudaTransport::put_poison(const Place& to, size_t rows, const CellGeometry& cell) {
  if (rows == 0 || cell.row_bytes == 0) return;
  ContextGuard guard(device_);
  check(driver()->cuMemsetD2D8Async(arena_->ptr() + to.offset, cell.pitch, cell.poison_byte,
                                    cell.row_bytes, rows, stream_of(to)),
        "cuMemsetD2D8Async");
}

void CudaTransport::stamp(const Mark& mark, const Place& at) {
  ContextGuard guard(device_);
  auto offset = static_cast<size_t>(reinterpret_cast<const uint8_t*>(&mark.stamp) - block_base_);
  check(driver()->cuStreamWriteValue64(stream_of(at), registered_.device_pointer() + offset,
                                       mark.key, CU_STREAM_WRITE_VALUE_DEFAULT),
        "cuStreamWriteValue64");
  std::lock_guard lock(mutex_);
  ++stamped_;
}

void CudaTransport::mark() {
  std::lock_guard lock(mutex_);
  if (marked_ == stamped_) return;
  ContextGuard guard(device_);
  for (size_t i = 0; i < kStreams; ++i)
    check(driver()->cuStreamWriteValue64(streams_[i],
                                         performed_.device_pointer() + i * sizeof(uint64_t),
                                         stamped_, CU_STREAM_WRITE_VALUE_DEFAULT),
          "cuStreamWriteValue64");
  marked_ = stamped_;
}

uint64_t CudaTransport::performed() const {
  const auto* words = reinterpret_cast<const std::atomic<uint64_t>*>(performed_.host());
  uint64_t least = words[0].load(std::memory_order_acquire);
  for (size_t i = 1; i < kStreams; ++i)
    least = std::min(least, words[i].load(std::memory_order_acquire));
  return least;
}

bool CudaTransport::finish(uint64_t limit_ns) {
  Patience patience(static_cast<double>(limit_ns) / 1e9);
  mark();
  while (performed() < stamped_) {
    patience.tick();
    if (patience.over()) return false;
    sleep_ns(20000);
  }
  return true;
}

}  // namespace tapchannel
