#include "cuda_port.hpp"

namespace tapchannel {

using namespace cuda;

namespace {
CUstream as_stream(uintptr_t handle) { return reinterpret_cast<CUstream>(handle); }
constexpr double kFillLimit = 5.0;
}  // namespace

CudaPort::CudaPort(Device device, std::shared_ptr<DeviceArena> arena,
                   const std::vector<ControlBlock*>& blocks)
    : device_(std::move(device)),
      arena_(std::move(arena)),
      words_(device_, kReleaseWords * sizeof(uint64_t)),
      pattern_(device_, 2 * kPatternBytes) {
  std::memset(words_.host(), 0, kReleaseWords * sizeof(uint64_t));
  std::memset(pattern_.host(), 0xff, kPatternBytes);
  std::memset(pattern_.host() + kPatternBytes, 0x80, kPatternBytes);
  for (ControlBlock* block : blocks) {
    auto& memory = block->memory();
    lanes_.push_back(
        {memory.base(), std::make_shared<RegisteredHost>(device_, memory.base(), memory.bytes())});
  }
  ContextGuard guard(device_);
  check(driver()->cuStreamCreate(&release_stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  check(driver()->cuStreamCreate(&poison_stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  check(driver()->cuEventCreate(&event_, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  filler_ = std::thread([this] { run_fills(); });
}

void CudaPort::enter_thread() { relax_capture_on_this_thread(); }

CudaPort::~CudaPort() {
  {
    std::lock_guard lock(fill_mutex_);
    fill_stop_ = true;
    fill_bell_.notify_one();
  }
  if (filler_.joinable()) filler_.join();
  try {
    ContextGuard guard(device_);
    static_cast<void>(driver()->cuStreamDestroy(release_stream_));
    static_cast<void>(driver()->cuStreamDestroy(poison_stream_));
    static_cast<void>(driver()->cuEventDestroy(event_));
  } catch (const std::exception&) {  // the driver is shutting down: nothing left to free
  }
}

bool CudaPort::capturing(uintptr_t stream) const {
  ContextGuard guard(device_);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  CUresult asked = driver()->cuStreamIsCapturing(as_stream(stream), &status);
  return asked == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

void CudaPort::wait(uintptr_t stream, size_t lane, const std::atomic<uint64_t>& stamp,
                    uint64_t key) {
  ContextGuard guard(device_);
  const RegisteredBlock& from = lanes_[lane];
  auto offset = static_cast<size_t>(reinterpret_cast<const uint8_t*>(&stamp) - from.base);
  check(driver()->cuStreamWaitValue64(as_stream(stream), from.registered->device_pointer() + offset,
                                      key, CU_STREAM_WAIT_VALUE_GEQ),
        "cuStreamWaitValue64");
}

Given CudaPort::release(const std::vector<uintptr_t>& streams, size_t word, uint64_t value,
                        uint64_t offset, uint64_t fill_bytes) noexcept {
  try {
    ContextGuard guard(device_);
    for (uintptr_t stream : streams)
      if (capturing(stream)) return Given::refused;
    CUstream last = as_stream(streams.front());
    if (streams.size() >
        1) {  // behind all of them, without making any of the user's streams wait for another
      last = release_stream_;
      for (uintptr_t stream : streams) {
        check(driver()->cuEventRecord(event_, as_stream(stream)), "cuEventRecord");
        check(driver()->cuStreamWaitEvent(last, event_, 0), "cuStreamWaitEvent");
      }
    }
    if (fill_bytes != 0)
      check(driver()->cuMemsetD8Async(arena_->ptr() + offset, 0xff, fill_bytes, last),
            "cuMemsetD8Async");
    check(driver()->cuStreamWriteValue64(last, words_.device_pointer() + word * sizeof(uint64_t),
                                         value, CU_STREAM_WRITE_VALUE_DEFAULT),
          "cuStreamWriteValue64");
    return Given::enqueued;
  } catch (const std::exception&) {
    return Given::refused;  // the slot stays held, and the time-out that follows names it
  }
}

bool CudaPort::released(size_t word, uint64_t value) const {
  return reinterpret_cast<const std::atomic<uint64_t>*>(words_.host())[word].load(
             std::memory_order_acquire) == value;
}

// Copies from pinned host memory complete behind a stuck wait even with
// CUDA_DEVICE_MAX_CONNECTIONS=1; a memset does not.
void CudaPort::fill_region(const Region& region, uint64_t pattern) {
  uint64_t width = std::min<uint64_t>(region.cell.row_bytes, kPatternBytes);
  uint64_t height = std::max<uint64_t>(1, kPatternBytes / std::max<uint64_t>(width, 1));
  for (uint64_t column = 0; column < region.cell.row_bytes; column += width)
    for (uint64_t row = 0; row < region.rows; row += height) {
      CUDA_MEMCPY2D copy{};
      copy.srcMemoryType = CU_MEMORYTYPE_HOST;
      copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
      copy.srcHost = pattern_.host() + pattern;
      copy.dstDevice = arena_->ptr() + region.offset + row * region.cell.pitch + column;
      copy.dstPitch = region.cell.pitch;
      copy.WidthInBytes = copy.srcPitch = std::min(width, region.cell.row_bytes - column);
      copy.Height = std::min<uint64_t>(height, region.rows - row);
      check(driver()->cuMemcpy2DAsync(&copy, poison_stream_), "cuMemcpy2DAsync");
    }
}

// Bounded: a GPU that hangs must not keep the process from ending.
void CudaPort::fill(const std::vector<Region>& regions) {
  ContextGuard guard(device_);
  for (const auto& region : regions)
    fill_region(region, region.cell.poison_byte == 0xff ? 0 : kPatternBytes);
  Patience patience(kFillLimit);
  while (driver()->cuStreamQuery(poison_stream_) == CUDA_ERROR_NOT_READY) {
    patience.tick();
    if (patience.over()) return;
    sleep_ns(50000);
  }
}

void CudaPort::run_fills() {
  enter_thread();
  std::unique_lock lock(fill_mutex_);
  while (true) {
    fill_bell_.wait(lock, [this] { return fill_stop_ || !fills_.empty(); });
    if (fills_.empty()) return;
    std::vector<Region> regions = std::move(fills_.front());
    fills_.pop_front();
    lock.unlock();
    try {
      fill(regions);
    } catch (const std::exception&) {  // the lease raises all the same; nothing to add here
    }
    fills_done_.fetch_add(1, std::memory_order_release);
    lock.lock();
  }
}

uint64_t CudaPort::start_fill(std::vector<Region> regions) {
  std::lock_guard lock(fill_mutex_);
  fills_.push_back(std::move(regions));
  fill_bell_.notify_one();
  return ++fills_begun_;
}

std::unique_ptr<Passage> CudaPort::passage(std::shared_ptr<Mapping> staging) {
  auto pinned = std::make_shared<PinnedMapping>(device_, std::move(staging));
  return std::make_unique<CudaPassage>(arena_, std::move(pinned), lanes_);
}

bool CudaPort::filled(uint64_t job) const {
  return fills_done_.load(std::memory_order_acquire) >= job;
}

}  // namespace tapchannel
