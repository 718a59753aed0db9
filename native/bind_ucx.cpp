#include "bind_ucx.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "ucx_transport.hpp"

namespace tapchannel {

namespace {

std::string text_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

ucx::Region region_of(const nb::tuple& facts) {
  return {nb::cast<uint64_t>(facts[0]), nb::cast<uint64_t>(facts[1]),
          text_of(nb::cast<nb::bytes>(facts[2]))};
}

UcxMemory register_arena(const PyUcxContext& context, const Arena& arena) {
  if (!arena.host && !arena.device) throw std::invalid_argument("the memory was let go already");
  nb::gil_scoped_release open;
  if (arena.host)
    return {std::make_shared<ucx::Memory>(context.context, arena.host->base(), arena.host->bytes(),
                                          false, arena.host)};
  return {std::make_shared<ucx::Memory>(context.context,
                                        reinterpret_cast<void*>(arena.device->ptr()),
                                        arena.device->bytes(), true, arena.device)};
}

void bind_context(nb::module_& module) {
  module.def(
      "ucx_load",
      [](const std::vector<std::string>& preload, const std::string& path) {
        const ucx::Api& api = ucx::load(preload, path);
        return std::to_string(api.major) + "." + std::to_string(api.minor) + "." +
               std::to_string(api.release);
      },
      nb::arg("preload"), nb::arg("path"), "Loads UCX, once per process, and gives its version.");
  nb::class_<UcxMemory>(module, "UcxMemory", "Memory that a peer with its key may write.")
      .def_prop_ro("address", [](const UcxMemory& self) { return self.memory->address(); })
      .def_prop_ro("key", [](const UcxMemory& self) {
        const std::string& key = self.memory->key();
        return nb::bytes(key.data(), key.size());
      });
  nb::class_<PyUcxContext> context(module, "UcxContext",
                                   "One UCX context: its devices, its rules.");
  context.def(
      "__init__",
      [](PyUcxContext* self, const std::vector<std::pair<std::string, std::string>>& settings,
         std::optional<int> ordinal) {
        nb::gil_scoped_release open;
        std::optional<cuda::Device> device;
        if (ordinal) device.emplace(*ordinal);
        new (self) PyUcxContext{std::make_shared<ucx::Context>(settings, std::move(device))};
      },
      nb::arg("settings"), nb::arg("ordinal").none(),
      "ordinal: the GPU whose memory it registers and moves, if any.");
  context.def("register", &register_arena, nb::arg("arena"));
  context.def(
      "register_block",
      [](const PyUcxContext& self, const Block& block) {
        return register_block(self, block.block);
      },
      nb::arg("block"), "The block must outlive the link that this registration is given to.");
  context.def(
      "describe", [](const PyUcxContext& self) { return self.context->describe(); },
      "UCX's own list of its transports and devices.");
}

void bind_link(nb::module_& module) {
  nb::class_<PyUcxLink> link(module, "UcxLink", "One end of a lane between hosts.");
  link.def(
      "__init__",
      [](PyUcxLink* self, const PyUcxContext& context, bool consumer, const UcxMemory& block,
         double limit) {
        nb::gil_scoped_release open;
        auto side = consumer ? ucx::Side::consumer : ucx::Side::producer;
        new (self)
            PyUcxLink{std::make_shared<ucx::Link>(context.context, side, block.memory, limit)};
      },
      nb::arg("context"), nb::arg("consumer"), nb::arg("block"), nb::arg("limit"));
  link.def_prop_ro("address", [](const PyUcxLink& self) {
    const std::string& address = self.link->address();
    return nb::bytes(address.data(), address.size());
  });
  link.def(
      "connect",
      [](PyUcxLink& self, const nb::bytes& peer, const nb::tuple& block, const nb::tuple& arena,
         const nb::tuple& words) {
        std::string address = text_of(peer);
        ucx::Link::Regions regions{region_of(block), region_of(arena), region_of(words)};
        nb::gil_scoped_release open;
        self.link->connect(address, regions);
      },
      nb::arg("address"), nb::arg("block"), nb::arg("arena"), nb::arg("words"),
      "Connects to a peer's worker; the regions are (address, bytes, key).",
      nb::sig("def connect(self, address: bytes, block: tuple[int, int, bytes], arena: tuple[int, "
              "int, bytes], words: tuple[int, int, bytes]) -> None"));
  link.def(
      "write",
      [](PyUcxLink& self, uint64_t offset, const nb::bytes& bytes, double limit) {
        std::string text = text_of(bytes);
        nb::gil_scoped_release open;
        self.link->write(offset, text, limit);
      },
      nb::arg("offset"), nb::arg("bytes"), nb::arg("limit"),
      "Puts bytes into the peer's arena and waits until they are performed there.");
  link.def(
      "measure",
      [](PyUcxLink& self, uint64_t offset, size_t bytes, size_t count, double limit) {
        nb::gil_scoped_release open;
        return self.link->measure(offset, bytes, count, limit);
      },
      nb::arg("offset"), nb::arg("bytes"), nb::arg("count"), nb::arg("limit"),
      "Puts zeros into the peer's arena, several times over; gives the seconds.");
  link.def("transports", [](const PyUcxLink& self) { return self.link->transports(); });
  link.def_prop_ro("rings", [](const PyUcxLink& self) { return self.link->rings(); });
  link.def_prop_ro("failure", [](const PyUcxLink& self) { return self.link->failure(); });
  link.def(
      "settle",
      [](PyUcxLink& self, double limit) {
        nb::gil_scoped_release open;
        return self.link->settle(static_cast<uint64_t>(limit * 1e9));
      },
      nb::arg("limit"), "Waits until this side's words have been performed at the other side.");
  link.def("end", [](PyUcxLink& self) {
    nb::gil_scoped_release open;
    self.link->end();
  });
  link.def(
      "wire",
      [](const PyUcxLink& self, std::optional<int> ordinal, bool ucx_reads_gpu) {
        return Wire{[link = self.link, ordinal,
                     ucx_reads_gpu](const ControlBlock& block) -> std::unique_ptr<Transport> {
          size_t cells = block.depth() * block.cells();
          if (!ordinal) return std::make_unique<ucx::UcxTransport>(link, cells);
          return std::make_unique<ucx::UcxGpuTransport>(link, cells, cuda::Device(*ordinal),
                                                        ucx_reads_gpu);
        }};
      },
      nb::arg("ordinal").none(), nb::arg("ucx_reads_gpu"),
      "The producer's transport over this link, from host memory or from a GPU.");
}

}  // namespace

UcxMemory register_block(const PyUcxContext& context, const ControlBlock& block) {
  const Mapping& memory = block.memory();
  return {std::make_shared<ucx::Memory>(context.context, memory.base(), memory.bytes(), false,
                                        nullptr)};
}

void bind_ucx(nb::module_& module) {
  bind_context(module);
  bind_link(module);
}

}  // namespace tapchannel
