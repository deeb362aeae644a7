// What torch knows of program.h and decode_steps.h.
#include <torch/custom_class.h>
#include <torch/library.h>

#include "decode_steps.h"
#include "program.h"

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  using tandem::DecodeSteps;
  using tandem::Program;
  m.class_<Program>("Program").def(torch::init<>()).def("add", &Program::add).def("run", &Program::run);
  m.class_<DecodeSteps>("DecodeSteps")
      .def(torch::init<c10::intrusive_ptr<Program>, int64_t>())
      .def("bind", &DecodeSteps::bind)
      .def("run", &DecodeSteps::run);
}
