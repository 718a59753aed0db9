#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bind.hpp"
#include "faulty_transport.hpp"

namespace tapchannel {

namespace {

Mishap mishap_named(const std::string& name) {
  static constexpr const char* kNames[] = {"none",      "delay", "hold",    "drop",
                                           "duplicate", "tear",  "overtake"};
  for (size_t i = 0; i < std::size(kNames); ++i)
    if (name == kNames[i]) return static_cast<Mishap>(i);
  throw std::invalid_argument("no mishap is called " + name);
}

Wire over_faults(Wire& wire, const std::shared_ptr<Faults>& faults) {
  if (!wire.make) throw std::invalid_argument("an outbox took this wire over already");
  return {[make = std::exchange(wire.make, nullptr), faults](const ControlBlock& block) {
    return std::make_unique<FaultyTransport>(make(block), faults);
  }};
}

}  // namespace

void bind_faults(nb::module_& module) {
  nb::class_<Faults>(module, "Faults", "What befalls the next messages of a lane, for tests.")
      .def(nb::init<>())
      .def(
          "next",
          [](Faults& self, const std::string& mishap, double seconds) {
            self.next(mishap_named(mishap), seconds);
          },
          nb::arg("mishap"), nb::arg("seconds") = 0.0)
      .def(
          "let_go",
          [](Faults& self) {
            nb::gil_scoped_release open;
            self.let_go();
          },
          "Puts and stamps what was held, in order.")
      .def("held", &Faults::held, "Counts the calls that wait for let_go.")
      .def(
          "wrap",
          [](const std::shared_ptr<Faults>& self, Wire& wire) { return over_faults(wire, self); },
          nb::arg("wire"), "A wire of which this is the fate; takes the given one over.");
}

}  // namespace tapchannel
