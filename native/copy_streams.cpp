#include "copy_streams.hpp"

namespace tapchannel::cuda {

CopyStreams::CopyStreams(Device device) : device_(std::move(device)), performed_(device_, 4096) {
  std::memset(performed_.host(), 0, 4096);
  ContextGuard guard(device_);
  RelaxedCapture relaxed;
  for (CUstream& stream : streams_)
    check(driver()->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
}

CopyStreams::~CopyStreams() {
  try {
    ContextGuard guard(device_);
    for (CUstream stream : streams_) static_cast<void>(driver()->cuStreamDestroy(stream));
  } catch (const std::exception&) {  // the driver is shutting down: nothing left to free
  }
}

void CopyStreams::write(size_t track, CUdeviceptr word, std::uint64_t value) {
  check(driver()->cuStreamWriteValue64(of(track), word, value, CU_STREAM_WRITE_VALUE_DEFAULT),
        "cuStreamWriteValue64");
  std::lock_guard lock(mutex_);
  ++written_;
}

void CopyStreams::mark() {
  std::lock_guard lock(mutex_);
  if (marked_ == written_) return;
  ContextGuard guard(device_);
  for (size_t i = 0; i < kStreams; ++i)
    check(driver()->cuStreamWriteValue64(streams_[i],
                                         performed_.device_pointer() + i * sizeof(std::uint64_t),
                                         written_, CU_STREAM_WRITE_VALUE_DEFAULT),
          "cuStreamWriteValue64");
  marked_ = written_;
}

std::uint64_t CopyStreams::performed() const {
  const auto* words = reinterpret_cast<const std::atomic<std::uint64_t>*>(performed_.host());
  std::uint64_t least = words[0].load(std::memory_order_acquire);
  for (size_t i = 1; i < kStreams; ++i)
    least = std::min(least, words[i].load(std::memory_order_acquire));
  return least;
}

bool CopyStreams::finish(std::uint64_t limit_ns) {
  Patience patience(static_cast<double>(limit_ns) / 1e9);
  mark();
  while (performed() < written_) {
    patience.tick();
    if (patience.over()) return false;
    sleep_ns(20000);
  }
  return true;
}

void enqueue_rows(const Rows& to, const Rows& from, std::size_t row_bytes, std::size_t rows,
                  CUstream stream) {
  if (rows == 0 || row_bytes == 0) return;
  const Driver& cu = *driver();
  std::size_t bytes = rows * row_bytes;
  bool flat = (to.pitch == row_bytes && from.pitch == row_bytes) || rows == 1;
  if (flat && to.host != nullptr) {
    check(cu.cuMemcpyDtoHAsync(to.host, from.address, bytes, stream), "cuMemcpyDtoHAsync");
  } else if (flat && from.host != nullptr) {
    check(cu.cuMemcpyHtoDAsync(to.address, from.host, bytes, stream), "cuMemcpyHtoDAsync");
  } else if (flat) {
    check(cu.cuMemcpyDtoDAsync(to.address, from.address, bytes, stream), "cuMemcpyDtoDAsync");
  } else {
    CUDA_MEMCPY2D copy{};
    copy.srcMemoryType = from.host != nullptr ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    copy.srcHost = from.host;
    copy.srcDevice = from.address;
    copy.srcPitch = from.pitch;
    copy.dstMemoryType = to.host != nullptr ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    copy.dstHost = to.host;
    copy.dstDevice = to.address;
    copy.dstPitch = to.pitch;
    copy.WidthInBytes = row_bytes;
    copy.Height = rows;
    check(cu.cuMemcpy2DAsync(&copy, stream), "cuMemcpy2DAsync");
  }
}

}  // namespace tapchannel::cuda
