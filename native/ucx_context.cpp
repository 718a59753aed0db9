#include "ucx_context.hpp"

#include <cstdlib>

namespace tapchannel::ucx {

namespace {
// UCX reads its environment itself; what the user set there wins over ours.
bool set_by_user(const std::string& name) {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): read only, as UCX itself does
  return std::getenv(("UCX_" + name).c_str()) != nullptr;
}

ucp_context_h make_context(const ucp_config_t* config) {
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
  params.features = UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP;
  params.mt_workers_shared = 1;
  ucp_context_h made = nullptr;
  // The oldest API that has all we use: a newer number would only make an older library complain.
  check(api().ucp_init_version(1, 13, &params, config, &made), "ucp_init_version");
  return made;
}
}  // namespace

Context::Context(const std::vector<std::pair<std::string, std::string>>& settings,
                 std::optional<cuda::Device> device)
    : device_(std::move(device)) {
  auto guard = enter();
  ucp_config_t* config = nullptr;
  check(api().ucp_config_read(nullptr, nullptr, &config), "ucp_config_read");
  try {
    for (const auto& [name, value] : settings)
      if (!set_by_user(name)) {
        // A setting that this version does not know is one that it does not need.
        ucs_status_t set = api().ucp_config_modify(config, name.c_str(), value.c_str());
        if (set != UCS_ERR_NO_ELEM && set != UCS_OK)
          throw UcxError(std::string("UCX_").append(name).append("=").append(value), set);
      }
    handle_ = make_context(config);
  } catch (...) {
    api().ucp_config_release(config);
    throw;
  }
  api().ucp_config_release(config);
}

std::unique_ptr<cuda::ContextGuard> Context::enter() const {
  return device_ ? std::make_unique<cuda::ContextGuard>(*device_) : nullptr;
}

Context::~Context() {
  if (handle_ != nullptr) api().ucp_cleanup(handle_);
}

std::string printed(const std::function<void(FILE*)>& print) {
  char* text = nullptr;
  size_t bytes = 0;
  FILE* stream = open_memstream(&text, &bytes);
  if (stream == nullptr) return {};
  print(stream);
  static_cast<void>(fclose(stream));
  std::string made(text, bytes);
  free(text);  // NOLINT(cppcoreguidelines-no-malloc): open_memstream's rule
  return made;
}

std::string Context::describe() const {
  return printed([this](FILE* to) { api().ucp_context_print_info(handle_, to); });
}

Memory::Memory(std::shared_ptr<Context> context, void* address, size_t bytes, bool on_gpu,
               std::shared_ptr<void> owner)
    : context_(std::move(context)),
      owner_(std::move(owner)),
      address_(reinterpret_cast<uint64_t>(address)),
      bytes_(bytes) {
  auto guard = context_->enter();
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  params.address = address;
  params.length = bytes;
  params.memory_type = on_gpu ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
  check(api().ucp_mem_map(context_->handle(), &params, &handle_), "ucp_mem_map");
  void* packed = nullptr;
  size_t packed_bytes = 0;
  ucs_status_t status = api().ucp_rkey_pack(context_->handle(), handle_, &packed, &packed_bytes);
  if (status != UCS_OK) {
    static_cast<void>(api().ucp_mem_unmap(context_->handle(), handle_));
    throw UcxError("ucp_rkey_pack", status);
  }
  key_.assign(static_cast<const char*>(packed), packed_bytes);
  api().ucp_rkey_buffer_release(packed);
}

Memory::~Memory() {
  try {
    auto guard = context_->enter();
    static_cast<void>(api().ucp_mem_unmap(context_->handle(), handle_));
  } catch (const std::exception&) {  // the driver is shutting down: nothing left to free
  }
}

}  // namespace tapchannel::ucx
