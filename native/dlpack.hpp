// The few structs of DLPack's legacy exchange that a capsule needs (github.com/dmlc/dlpack, version
// 0.8 layout).
#pragma once

#include <cstdint>

namespace tapchannel::dlpack {

struct Device {
  int32_t type;  // 1 = CPU, 2 = CUDA
  int32_t id;
};
struct DataType {
  uint8_t code;  // 1 = unsigned integer
  uint8_t bits;
  uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};
static_assert(sizeof(Tensor) == 48 && sizeof(ManagedTensor) == 64);

}  // namespace tapchannel::dlpack
