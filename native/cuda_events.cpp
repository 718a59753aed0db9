#include "cuda_events.hpp"

#include "transport.hpp"

namespace tapchannel::cuda {

Events::~Events() {
  try {
    ContextGuard guard(device_);
    for (CUevent event : pool_) static_cast<void>(driver()->cuEventDestroy(event));
  } catch (const std::exception&) {  // the driver is shutting down: nothing left to free
  }
}

CUevent Events::record(std::uintptr_t stream) {
  auto* handle = reinterpret_cast<CUstream>(stream);
  ContextGuard guard(device_);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  CUresult asked = driver()->cuStreamIsCapturing(handle, &status);
  if (asked == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT ||
      (asked == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE))
    throw CapturingError();
  check(asked, "cuStreamIsCapturing");
  CUevent event = take();
  CUresult recorded = driver()->cuEventRecord(event, handle);
  if (recorded != CUDA_SUCCESS) give_back(event);
  check(recorded, "cuEventRecord");
  return event;
}

CUevent Events::take() {
  std::lock_guard lock(mutex_);
  CUevent event = nullptr;
  if (pool_.empty()) {
    check(driver()->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    return event;
  }
  event = pool_.back();
  pool_.pop_back();
  return event;
}

void Events::give_back(CUevent event) {
  std::lock_guard lock(mutex_);
  pool_.push_back(event);
}

}  // namespace tapchannel::cuda
