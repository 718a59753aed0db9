// SPDX-License-Identifier: Apache-2.0
// Probes of the CUDA driver for Python. None of them creates a context.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <array>
#include <string>

#include "bind.hpp"
#include "cuda_context.hpp"

namespace tapchannel::cuda {
namespace {

struct DeviceFacts {
  std::string name, pci_bus_id;
  Uuid uuid{};
  std::size_t total_bytes = 0;
};

DeviceFacts facts_of(CUdevice device) {
  const Driver& cu = require_driver();
  DeviceFacts facts;
  std::array<char, 256> text{};
  check(cu.cuDeviceGetName(text.data(), text.size(), device), "cuDeviceGetName");
  facts.name = text.data();
  check(cu.cuDeviceGetPCIBusId(text.data(), text.size(), device), "cuDeviceGetPCIBusId");
  facts.pci_bus_id = text.data();
  facts.uuid = device_uuid(device);
  check(cu.cuDeviceTotalMem(&facts.total_bytes, device), "cuDeviceTotalMem");
  return facts;
}

nb::dict cuda_status() {
  const Driver* usable = nullptr;
  {
    nb::gil_scoped_release unlocked;  // the first call loads the driver
    usable = driver();
  }
  nb::dict status;
  status["available"] = usable != nullptr;
  status["refusal"] = driver_refusal();
  status["driver_version"] = usable != nullptr ? usable->version : 0;
  return status;
}

int device_count() {
  if (driver() == nullptr) return 0;
  int count = 0;
  check(require_driver().cuDeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

nb::dict device_info(int ordinal) {
  const auto device = [ordinal] {
    nb::gil_scoped_release unlocked;
    return device_handle(ordinal);
  }();
  const auto attribute = [device](CUdevice_attribute which) {
    return device_attribute(device, which);
  };
  const DeviceFacts facts = facts_of(device);
  nb::dict info;
  info["ordinal"] = ordinal;
  info["name"] = facts.name;
  info["uuid"] = nb::bytes(reinterpret_cast<const char*>(facts.uuid.data()), facts.uuid.size());
  info["pci_bus_id"] = facts.pci_bus_id;
  info["total_bytes"] = facts.total_bytes;
  info["compute_capability"] =
      nb::make_tuple(attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                     attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
  info["stream_mem_ops_64"] = attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS) != 0;
  info["vmm"] = attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) != 0;
  info["posix_fd_handles"] =
      attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) != 0;
  info["gpu_direct_rdma"] = attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED) != 0;
  info["gpu_direct_rdma_vmm"] =
      attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) != 0;
  info["gpu_direct_rdma_writes_ordering"] =
      attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING);
  info["gpu_direct_rdma_flush_options"] =
      attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS);
  info["can_flush_remote_writes"] = attribute(CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES) != 0;
  info["host_pointer_for_registered_memory"] =
      attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) != 0;
  info["unified_addressing"] = attribute(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING) != 0;
  return info;
}

bool can_access_peer(int ordinal, int peer_ordinal) {
  int possible = 0;
  check(require_driver().cuDeviceCanAccessPeer(&possible, device_handle(ordinal),
                                               device_handle(peer_ordinal)),
        "cuDeviceCanAccessPeer");
  return possible != 0;
}

}  // namespace
}  // namespace tapchannel::cuda

namespace tapchannel {

void bind_cuda(nb::module_& m) {
  m.def("cuda_status", &cuda::cuda_status, nb::sig("def cuda_status() -> dict[str, object]"),
        "Say whether the CUDA driver is usable, and why not: available, refusal, driver_version.");
  m.def("device_count", &cuda::device_count, nb::call_guard<nb::gil_scoped_release>(),
        "Count the CUDA devices that this process sees; 0 without a driver.");
  m.def("device_info", &cuda::device_info, nb::arg("ordinal"),
        nb::sig("def device_info(ordinal: int) -> dict[str, object]"),
        "Describe one CUDA device without making a context on it.");
  m.def("can_access_peer", &cuda::can_access_peer, nb::arg("ordinal"), nb::arg("peer_ordinal"),
        nb::call_guard<nb::gil_scoped_release>(),
        "Say whether one device can map the other's memory.");
}

}  // namespace tapchannel
