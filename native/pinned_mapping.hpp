// Memory that two processes share and that this one's driver has registered: a GPU copies to and
// from it without the calling thread, and writes words into it.
#pragma once

#include <memory>

#include "control_block.hpp"
#include "cuda_memory.hpp"
#include "mapping.hpp"

namespace tapchannel {

class PinnedMapping {
 public:
  PinnedMapping(const cuda::Device& device, std::shared_ptr<Mapping> memory)
      : device_(device),
        memory_(std::move(memory)),
        registered_(device_, memory_->base(), round_up(memory_->bytes(), kPage)) {}
  const cuda::Device& device() const { return device_; }
  uint8_t* base() const { return memory_->base(); }
  cuda::CUdeviceptr address() const { return registered_.device_pointer(); }

 private:
  static constexpr size_t kPage = 4096;  // the driver pins whole pages
  cuda::Device device_;
  std::shared_ptr<Mapping> memory_;
  cuda::RegisteredHost registered_;  // goes before the mapping does
};

}  // namespace tapchannel
