// SPDX-License-Identifier: Apache-2.0
// A device with its primary context, and the guards that borrow the calling thread's CUDA state and
// give it back.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>

#include "cuda_driver.hpp"

namespace tapchannel::cuda {

using Uuid = std::array<std::uint8_t, 16>;

// The three below ask about a device without creating a context on it.
inline CUdevice device_handle(int ordinal) {
  CUdevice device = 0;
  check(require_driver().cuDeviceGet(&device, ordinal), "cuDeviceGet");
  return device;
}

inline Uuid device_uuid(CUdevice device) {
  CUuuid raw{};
  check(require_driver().cuDeviceGetUuid(&raw, device), "cuDeviceGetUuid");
  Uuid uuid{};
  std::copy(std::begin(raw.bytes), std::end(raw.bytes), uuid.begin());
  return uuid;
}

inline int device_attribute(CUdevice device, CUdevice_attribute attribute) {
  int value = 0;
  check(require_driver().cuDeviceGetAttribute(&value, attribute, device), "cuDeviceGetAttribute");
  return value;
}

// Returns the ordinal of the device with this UUID in this process, none where it is not visible
// here. Ordinals differ between processes (CUDA_VISIBLE_DEVICES), so a peer's device is always
// found this way.
inline std::optional<int> ordinal_of(const Uuid& uuid) {
  int count = 0;
  check(require_driver().cuDeviceGetCount(&count), "cuDeviceGetCount");
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    if (device_uuid(device_handle(ordinal)) == uuid) return ordinal;
  }
  return std::nullopt;
}

// A device and a share of its primary context.
// Ownership:  copies share one retain; the context lives until the last copy is gone (or the
// process ends).
class Device {
 public:
  explicit Device(int ordinal) : primary_(std::make_shared<const Primary>(ordinal)) {}

  int ordinal() const noexcept { return primary_->ordinal; }
  CUdevice handle() const noexcept { return primary_->device; }
  CUcontext context() const noexcept { return primary_->context; }
  const Uuid& uuid() const noexcept { return primary_->uuid; }
  int attribute(CUdevice_attribute which) const { return device_attribute(handle(), which); }

 private:
  struct Primary {
    explicit Primary(int wanted)
        : ordinal(wanted), device(device_handle(wanted)), uuid(device_uuid(device)) {
      check(require_driver().cuDevicePrimaryCtxRetain(&context, device),
            "cuDevicePrimaryCtxRetain");
    }
    // The answer is dropped: at exit the driver may already be gone (CUDA_ERROR_DEINITIALIZED), and
    // nothing is left to do.
    ~Primary() { static_cast<void>(driver()->cuDevicePrimaryCtxRelease(device)); }
    Primary(const Primary&) = delete;
    Primary& operator=(const Primary&) = delete;

    int ordinal;
    CUdevice device;
    Uuid uuid;
    CUcontext context = nullptr;
  };
  std::shared_ptr<const Primary> primary_;
};

// Makes the device's primary context current on this thread for the guard's life, if it is not
// already. Ordering:   the caller's context (or none) is current again afterwards, so the current
// device of torch never changes. Ownership:  one thread, one scope; the Device must outlive the
// guard.
class ContextGuard {
 public:
  explicit ContextGuard(const Device& device) {
    const Driver& cu = require_driver();
    CUcontext current = nullptr;
    check(cu.cuCtxGetCurrent(&current), "cuCtxGetCurrent");
    if (current == device.context()) return;
    check(cu.cuCtxPushCurrent(device.context()), "cuCtxPushCurrent");
    pushed_ = true;
  }
  ~ContextGuard() {
    if (!pushed_) return;
    CUcontext popped = nullptr;
    static_cast<void>(driver()->cuCtxPopCurrent(&popped));
  }
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  bool pushed_ = false;
};

// Lets this thread make calls (allocate, free, query an event) that a CUDA graph capture elsewhere
// would otherwise forbid, and that would invalidate that capture. It does not make it right to
// enqueue into a capturing stream.
class RelaxedCapture {
 public:
  RelaxedCapture() {
    check(require_driver().cuThreadExchangeStreamCaptureMode(&mode_),
          "cuThreadExchangeStreamCaptureMode");
  }
  ~RelaxedCapture() { static_cast<void>(driver()->cuThreadExchangeStreamCaptureMode(&mode_)); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// The same, for the rest of a thread's life. For threads of ours only: a caller's thread keeps its
// own mode.
inline void relax_capture_on_this_thread() {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  static_cast<void>(require_driver().cuThreadExchangeStreamCaptureMode(&mode));
}

}  // namespace tapchannel::cuda
