// A UCX context, and memory registered with it.
#pragma once

#include <cstdio>
#include <functional>
#include <memory>
#include <optional>

#include "cuda_context.hpp"
#include "ucx_api.hpp"

namespace tapchannel::ucx {

// What UCX prints of itself.
std::string printed(const std::function<void(FILE*)>& print);

// One context serves all lanes of a mailbox, or the one lane of an outbox. Each lane has a worker
// of its own: ending it ends what the peer can still write (the fence of DESIGN 6b).
class Context {
 public:
  // `settings`: (name, value) pairs without UCX_, such as NET_DEVICES. A variable that the user has
  // set in the environment is left alone.
  // `device`: the GPU whose memory it registers and moves, if any.
  Context(const std::vector<std::pair<std::string, std::string>>& settings,
          std::optional<cuda::Device> device);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ucp_context_h handle() const { return handle_; }
  // UCX works in the calling thread's CUDA context: what the guard is alive for. Null without a
  // GPU.
  std::unique_ptr<cuda::ContextGuard> enter() const;
  std::string describe() const;  // UCX's own print of its transports and devices

 private:
  std::optional<cuda::Device> device_;
  ucp_context_h handle_ = nullptr;
};

// A registered region: a peer that has its key may write it.
class Memory {
 public:
  // `owner` keeps the memory mapped; without one the caller does.
  Memory(std::shared_ptr<Context> context, void* address, size_t bytes, bool on_gpu,
         std::shared_ptr<void> owner);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  uint64_t address() const { return address_; }
  size_t bytes() const { return bytes_; }
  const std::string& key() const { return key_; }
  ucp_mem_h handle() const { return handle_; }

 private:
  std::shared_ptr<Context> context_;
  std::shared_ptr<void> owner_;
  uint64_t address_;
  size_t bytes_;
  ucp_mem_h handle_ = nullptr;
  std::string key_;
};

// What a peer told of a region of its own. Its bytes are untrusted: UCX parses the key, see Link.
struct Region {
  uint64_t address = 0;
  uint64_t bytes = 0;
  std::string key;
};

}  // namespace tapchannel::ucx
