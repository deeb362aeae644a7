// A step's calls, recorded once and made again without Python.
//
// A call into torch from Python takes two microseconds and more, and gives the interpreter's lock away and takes it
// back; a step makes a few hundred of them. A program holds the same calls as
//
//     operator    [ constant  constant  input 3  constant  input 0 ]
//
// where inputs are the tensors that differ from run to run. A run puts them in and calls the operator through torch's
// dispatcher, as Python would have. Values are not looked at and results are thrown away: programs are for operations
// that write into their arguments.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace tandem {

struct Call {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;
  std::vector<std::pair<int64_t, int64_t>> inputs;  // (place among the arguments, number of the input)
};

class Program : public torch::CustomClassHolder {
 public:
  // `arguments`, a tuple, are all that the schema names, in its order; those at `places` are the inputs `numbers`.
  void add(const std::string& name, const std::string& overload, const c10::IValue& arguments,
           std::vector<int64_t> places, std::vector<int64_t> numbers) {
    Call call{c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()),
              arguments.toTupleRef().elements().vec(),
              {}};
    TORCH_CHECK(call.arguments.size() == call.op.schema().arguments().size(), name, ": wrong number of arguments");
    TORCH_CHECK(places.size() == numbers.size(), "a number for each place");
    for (size_t i = 0; i < places.size(); i++) {
      call.arguments.at(places[i]) = c10::IValue();  // let go of what it was recorded with
      call.inputs.emplace_back(places[i], numbers[i]);
      num_inputs_ = std::max(num_inputs_, numbers[i] + 1);
    }
    calls_.push_back(std::move(call));
  }

  void run(const std::vector<at::Tensor>& inputs) {
    TORCH_CHECK(static_cast<int64_t>(inputs.size()) >= num_inputs_, "the program takes ", num_inputs_, " inputs");
    torch::jit::Stack stack;
    for (const Call& call : calls_) {
      stack.assign(call.arguments.begin(), call.arguments.end());
      for (const auto& [place, number] : call.inputs) stack[place] = inputs[number];
      call.op.callBoxed(stack);
    }
  }

 private:
  std::vector<Call> calls_;
  int64_t num_inputs_ = 0;
};

}  // namespace tandem
