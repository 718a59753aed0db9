// SPDX-License-Identifier: Apache-2.0
// Memory that a mailbox owns or an outbox maps. Destructors never throw, and do nothing once the
// driver is shut down.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "cuda_context.hpp"

namespace tapchannel::cuda {

enum class ArenaKind : std::uint8_t { vmm, ipc, local };

// Returns "vmm", "ipc" or "local".
const char* to_text(ArenaKind kind) noexcept;

// One contiguous range of device memory that other processes may map. Movable, not copyable.
//
//   factory          memory is freed when                                             kind
//   allocate_vmm     this arena and every importer, in any process, are gone          vmm
//   allocate_ipc     this arena is gone; importers must close theirs first            ipc
//   import_fd        (keeps a share, also after the exporter's end)                   vmm
//   import_handle    (keeps no share: undefined to use once the exporter freed it)    ipc
//   local            (owns nothing: the caller keeps the other arena alive)           local
//
// Destroying an arena while the GPU still copies to or from it is the caller's bug: synchronise the
// streams first.
class DeviceArena {
 public:
  using IpcHandle = std::array<std::uint8_t, 64>;

  // Allocates `bytes` on `device`, filled with 0xFF.
  // Blocks:     until the fill has been performed, so that nothing of ours can overwrite a first
  // put (step 5). On failure: throws CudaError; nothing stays allocated.
  static DeviceArena allocate_vmm(const Device& device, std::size_t bytes);
  static DeviceArena allocate_ipc(const Device& device, std::size_t bytes);

  // Maps a peer's allocate_vmm arena for `device`. `fd` stays the caller's to close, also right
  // after this returns. On failure: throws CudaError; CUDA_ERROR_INVALID_VALUE where the allocation
  // is smaller than `bytes`.
  static DeviceArena import_fd(const Device& device, int fd, std::size_t bytes);

  // Maps a peer's allocate_ipc arena for `device`; not possible in the process that exported it
  // (use `local`). On failure: throws CudaError; CUDA_ERROR_INVALID_VALUE where the allocation is
  // smaller than `bytes`.
  static DeviceArena import_handle(const Device& device, const IpcHandle& handle,
                                   std::size_t bytes);

  // Names memory of this process that another arena owns.
  static DeviceArena local(const Device& device, CUdeviceptr address, std::size_t bytes);

  // Returns a new file descriptor, close-on-exec, the caller's to close. Only for allocate_vmm
  // arenas.
  int export_fd() const;
  // Returns the handle of the whole allocation. Only for allocate_ipc arenas.
  IpcHandle export_handle() const;

  CUdeviceptr ptr() const noexcept { return address_; }
  std::size_t bytes() const noexcept { return bytes_; }  // as asked for
  std::size_t mapped_bytes() const noexcept {
    return mapped_;
  }  // rounded up to the driver's granularity
  ArenaKind kind() const noexcept { return kind_; }
  const Device& device() const noexcept { return device_; }

  DeviceArena(DeviceArena&& other) noexcept;
  DeviceArena& operator=(DeviceArena&& other) noexcept;
  DeviceArena(const DeviceArena&) = delete;
  DeviceArena& operator=(const DeviceArena&) = delete;
  ~DeviceArena();

 private:
  DeviceArena(const Device& device, ArenaKind kind, std::size_t bytes);
  void map_allocation();
  void fill();
  void free_memory();
  void swap(DeviceArena& other) noexcept;

  Device device_;
  ArenaKind kind_;
  bool imported_ = false;
  std::size_t bytes_;
  std::size_t mapped_;
  CUdeviceptr address_ = 0;                      // 0: nothing reserved yet
  bool is_mapped_ = false;                       // vmm: address_ has memory behind it
  CUmemGenericAllocationHandle allocation_ = 0;  // vmm: 0 once released
};

// Registers an existing host mapping (the control block's memfd) with the driver, for every context
// of this process. Ownership:  the mapping stays the caller's and must outlive this object; unmap
// only after it is gone.
class RegisteredHost {
 public:
  RegisteredHost(const Device& device, void* address, std::size_t bytes);
  ~RegisteredHost();
  RegisteredHost(const RegisteredHost&) = delete;
  RegisteredHost& operator=(const RegisteredHost&) = delete;

  void* host() const noexcept { return host_; }
  CUdeviceptr device_pointer() const noexcept {
    return device_pointer_;
  }  // as `device` sees host()
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  Device device_;
  void* host_;
  std::size_t bytes_;
  CUdeviceptr device_pointer_ = 0;
};

// Page-locked host memory of ours, such as the page of poison pattern. Its first content is
// undefined. Ownership:  this object's; no copy that reads it may still be queued when it goes.
class PinnedPage {
 public:
  PinnedPage(const Device& device, std::size_t bytes);
  ~PinnedPage();
  PinnedPage(const PinnedPage&) = delete;
  PinnedPage& operator=(const PinnedPage&) = delete;

  std::uint8_t* host() const noexcept { return host_; }
  CUdeviceptr device_pointer() const noexcept { return device_pointer_; }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  Device device_;
  std::uint8_t* host_ = nullptr;
  std::size_t bytes_;
  CUdeviceptr device_pointer_ = 0;
};

}  // namespace tapchannel::cuda
