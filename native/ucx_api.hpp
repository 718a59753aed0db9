// UCX through its C API, loaded at run time: built against the oldest supported headers, run on any
// UCX from 1.13 up. Structs carry masks of the fields in use, so an older header serves a newer
// library.
#pragma once

#include <ucp/api/ucp.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace tapchannel::ucx {

// One list: the table's members and the names that are looked up.
#define TAPCHANNEL_UCX_FUNCTIONS(X) \
  X(ucp_get_version)                \
  X(ucp_config_read)                \
  X(ucp_config_modify)              \
  X(ucp_config_release)             \
  X(ucp_init_version)               \
  X(ucp_cleanup)                    \
  X(ucp_context_print_info)         \
  X(ucp_mem_map)                    \
  X(ucp_mem_unmap)                  \
  X(ucp_rkey_pack)                  \
  X(ucp_rkey_buffer_release)        \
  X(ucp_ep_rkey_unpack)             \
  X(ucp_rkey_destroy)               \
  X(ucp_worker_create)              \
  X(ucp_worker_destroy)             \
  X(ucp_worker_get_address)         \
  X(ucp_worker_release_address)     \
  X(ucp_worker_progress)            \
  X(ucp_worker_get_efd)             \
  X(ucp_worker_arm)                 \
  X(ucp_ep_create)                  \
  X(ucp_ep_close_nbx)               \
  X(ucp_ep_print_info)              \
  X(ucp_ep_flush_nbx)               \
  X(ucp_put_nbx)                    \
  X(ucp_request_check_status)       \
  X(ucp_request_free)

struct Api {
// NOLINTNEXTLINE(bugprone-macro-parentheses): a name that is declared
#define TAPCHANNEL_UCX_MEMBER(name) decltype(&::name) name = nullptr;
  TAPCHANNEL_UCX_FUNCTIONS(TAPCHANNEL_UCX_MEMBER)
#undef TAPCHANNEL_UCX_MEMBER
  // Not in the table above: it is libucs's.
  const char* (*ucs_status_string)(ucs_status_t) = nullptr;
  unsigned major = 0, minor = 0, release = 0;
  std::string path;
};

struct UcxError : std::runtime_error {
  UcxError(const std::string& call, ucs_status_t status);
  explicit UcxError(const std::string& text) : std::runtime_error(text) {}
};

// Loads UCX once per process: `preload` first, in this order, then libucp at `path`.
// On failure: throws UcxError; a second call with another path throws too, since two copies of UCX
// in one process corrupt each other's memory hooks.
const Api& load(const std::vector<std::string>& preload, const std::string& path);

// The loaded UCX. Throws UcxError before load().
const Api& api();

std::string status_text(ucs_status_t status);
void check(ucs_status_t status, const char* call);

}  // namespace tapchannel::ucx
