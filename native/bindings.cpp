#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <system_error>

#include "bind.hpp"
#include "fork_guard.hpp"
#include "verdict.hpp"

namespace tapchannel {

namespace {

// The typed errors live in Python: one tree, one place for their texts.
void raise_typed(const char* name, nb::object text, nb::kwargs fields) {
  nb::object type = nb::module_::import_("tapchannel.errors").attr(name);
  nb::object error = type(text, **fields);
  PyErr_SetObject(type.ptr(), error.ptr());
}

void translate(const std::exception_ptr& caught, void*) {
  try {
    std::rethrow_exception(caught);
  } catch (const cuda::CudaError& error) {
    nb::kwargs fields;
    fields["call"] = error.call;
    fields["code"] = static_cast<int>(error.code);
    fields["name"] = error.name;
    fields["meaning"] = error.meaning;
    raise_typed("DeviceError", nb::str("the CUDA driver refused a call"), fields);
  } catch (const std::system_error& error) {
    nb::object args = nb::make_tuple(error.code().value(), nb::str(error.what()));
    PyErr_SetObject(PyExc_OSError, args.ptr());
  }
}

nb::dict layout() {
  nb::dict facts;
  BlockLayout sample{3, 5};
  facts["magic"] = kMagic;
  facts["version"] = kLayoutVersion;
  facts["header_bytes"] = sizeof(BlockHeader);
  facts["announce_bytes"] = sizeof(Announce);
  facts["event_bytes"] = sizeof(Event);
  facts["ring_entries"] = kRingEntries;
  facts["max_dims"] = kMaxDims;
  facts["max_depth"] = kMaxDepth;
  facts["max_cells"] = kMaxCells;
  facts["poison_bit"] = kPoison;
  facts["stamp_1_2_3"] = make_stamp(1, 2, 3);
  facts["block_bytes_3_5"] = sample.bytes();
  facts["stamps_3_5"] = sample.stamps();
  facts["announces_3_5"] = sample.announces();
  return facts;
}

void bind_verdict(nb::module_& module) {
  nb::class_<Holder>(module, "Holder")
      .def_ro("step", &Holder::step)
      .def_ro("microbatch", &Holder::microbatch)
      .def_ro("slot", &Holder::slot)
      .def_ro("leased", &Holder::leased);
  nb::class_<Verdict>(module, "Verdict")
      .def_prop_ro("fault", [](const Verdict& verdict) { return name_of(verdict.fault); })
      .def_ro("lane", &Verdict::lane)
      .def_ro("cell", &Verdict::cell)
      .def_ro("slot", &Verdict::slot)
      .def_ro("key", &Verdict::key)
      .def_ro("seen", &Verdict::seen)
      .def_ro("expected", &Verdict::expected)
      .def_ro("waited", &Verdict::waited)
      .def_ro("limit", &Verdict::limit)
      .def_ro("silent", &Verdict::silent)
      .def_prop_ro("reason",
                   [](const Verdict& verdict) {
                     return nb::bytes(verdict.reason.data(), verdict.reason.size());
                   })
      .def_ro("holders", &Verdict::holders);
}

}  // namespace

bool interrupted_by_signal() {
  nb::gil_scoped_acquire hold;
  return PyErr_CheckSignals() != 0;
}

nb::list events_of(const Ring& ring) {
  nb::list events;
  for (const EventFacts& event : read_ring(ring))
    events.append(nb::make_tuple(event.number, event.time_ns, event.key, event.bytes, event.step,
                                 event.cell));
  return events;
}

CellGeometry geometry_from(nb::handle fields) {
  auto values = nb::cast<std::vector<uint64_t>>(fields);
  if (values.size() != 10) throw std::invalid_argument("a cell's geometry has 10 fields");
  CellGeometry cell;
  cell.offset = values[0];
  cell.row_bytes = values[1];
  cell.pitch = values[2];
  cell.row_limit = values[3];
  cell.tap_rows = values[4];
  cell.dtype = static_cast<uint32_t>(values[5]);
  cell.poison_byte = static_cast<uint8_t>(values[6]);
  cell.tap = static_cast<uint32_t>(values[7]);
  cell.counts_rows = values[8] != 0;
  cell.width = values[9];
  return cell;
}

}  // namespace tapchannel

NB_MODULE(_native, module) {
  using namespace tapchannel;
  module.doc() =
      "Native core of tapchannel: control block, lanes, mailbox, CUDA driver loaded at run time.";
  ForkGuard::install();
  // A mailbox that a program keeps to its end is closed at exit, but its Python object is never
  // freed.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(translate, nullptr);
  module.def("layout", &layout, nb::sig("def layout() -> dict[str, int]"),
             "Offsets and constants of the control block, for the check at import.");
  module.def(
      "block_bytes", [](size_t depth, size_t cells) { return BlockLayout{depth, cells}.bytes(); },
      nb::arg("depth"), nb::arg("cells"), "The size of a lane's control block.");
  module.def(
      "step_names",
      [] {
        return std::vector<std::string>{"",          "grant",      "announce", "claim",  "order",
                                        "put",       "stamp",      "wait",     "read",   "release",
                                        "open_pass", "close_pass", "abort",    "poison", "attach",
                                        "lost",      "close"};
      },
      "Names of the flight recorder's steps, by number.");
  module.def("close_in_child", &ForkGuard::close_in_child, nb::arg("fd"),
             "A forked child closes this descriptor at once.");
  module.def("keep_in_child", &ForkGuard::forget, nb::arg("fd"));
  bind_verdict(module);
  bind_memory(module);
  bind_ucx(module);
  bind_mailbox(module);
  bind_outbox(module);
  bind_faults(module);
  bind_cuda(module);
}
