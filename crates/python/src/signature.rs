//! How an op is called from Python: the order of its arguments, what it returns, and PyTorch's schema for it. The Python
//! half and the native kernels both follow this.

use std::fmt::Write;
use warpsmith::op::{AttrKind, OpSpec, Role};

/// The two ways to call an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// Outputs are new tensors. Only what the op changes in part is written in place.
    New,
    /// Outputs that may be computed in place of an input are. Its name ends with an underscore.
    InPlace,
}

/// Who calls it: people by the public op, our own wrappers by the raw one, which has no autograd and cheaper arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Face {
    /// `torch.ops.warpsmith`: choices are names, options are given by keyword.
    Public,
    /// `torch.ops._warpsmith`: choices are positions, everything is positional.
    Raw,
}

/// The order of a call's arguments and results, by positions in the description. After the tensors come all options, then
/// a switch for each wanted output.
pub struct Signature {
    /// The op's description.
    pub spec: &'static OpSpec,
    /// The tensors given: those that must be, those that may, and of these the late ones last.
    pub tensors: Vec<Tensor>,
    /// Optional outputs that a switch asks for.
    pub wanted: Vec<usize>,
    /// Outputs that are returned.
    pub returned: Vec<usize>,
}

/// A tensor that a call is given.
#[derive(Debug, Clone, Copy)]
pub struct Tensor {
    /// Its position in the description.
    pub arg: usize,
    /// Whether the call may leave it out.
    pub optional: bool,
    /// Whether it is written: itself, or the output that is computed in its place.
    pub written: Option<usize>,
}

impl Signature {
    /// The signature of an op; `None` if it has no such variant.
    pub fn of(spec: &'static OpSpec, variant: Variant) -> Option<Signature> {
        let place_of = |index: usize| match spec.args[index].role {
            Role::Out { in_place_of } if variant == Variant::InPlace => in_place_of,
            _ => None,
        };
        let positions = 0..spec.args.len();
        if variant == Variant::InPlace && positions.clone().all(|index| place_of(index).is_none()) {
            return None;
        }
        let mut tensors: Vec<Tensor> = Vec::new();
        for (arg, described) in spec.args.iter().enumerate().filter(|(_, arg)| arg.is_input()) {
            let output = positions.clone().find(|&output| place_of(output) == Some(arg));
            // Without the input that a required output is computed in place of, there would be nowhere to put it.
            let needed = output.is_some_and(|output| !spec.args[output].optional);
            let written = if described.role == Role::InOut { Some(arg) } else { output };
            tensors.push(Tensor { arg, optional: described.optional && !needed, written });
        }
        tensors.sort_by_key(|tensor| (tensor.optional, tensor.optional && spec.args[tensor.arg].late));
        let returned: Vec<usize> =
            positions.filter(|&index| !spec.args[index].is_input() && place_of(index).is_none()).collect();
        // PyTorch cannot trace an op that both writes to its arguments and may return nothing in place of a tensor.
        if variant == Variant::InPlace && returned.iter().any(|&index| spec.args[index].optional) {
            return None;
        }
        let asked = |index: &usize| spec.args[*index].optional && spec.args[*index].with.is_none();
        let wanted = returned.iter().copied().filter(asked).collect();
        Some(Signature { spec, tensors, wanted, returned })
    }

    /// The op's name in this variant.
    pub fn name(spec: &OpSpec, variant: Variant) -> String {
        match variant {
            Variant::New => spec.name.into(),
            Variant::InPlace => format!("{}_", spec.name),
        }
    }

    /// What PyTorch is told about the op.
    pub fn schema(&self, name: &str, face: Face) -> String {
        let mut arguments = Vec::new();
        let mut alias = b'a';
        for tensor in &self.tensors {
            let mut text = String::from("Tensor");
            if tensor.written.is_some() {
                let _ = write!(text, "({}!)", char::from(alias));
                alias += 1;
            }
            let _ = match tensor.optional {
                true => write!(text, "? {}=None", self.spec.args[tensor.arg].name),
                false => write!(text, " {}", self.spec.args[tensor.arg].name),
            };
            arguments.push(text);
        }
        let options = !self.spec.attrs.is_empty() || !self.wanted.is_empty();
        if face == Face::Public && options {
            arguments.push("*".into());
        }
        for attr in self.spec.attrs {
            let name = attr.name;
            arguments.push(match (attr.kind, face) {
                (AttrKind::Float(value), _) => format!("float {name}={value:?}"),
                (AttrKind::OptionalFloat, _) => format!("float? {name}=None"),
                (AttrKind::Int(value), _) => format!("int {name}={value}"),
                (AttrKind::Bool(value), _) => format!("bool {name}={}", if value { "True" } else { "False" }),
                (AttrKind::Choice(names), Face::Public) => format!("str {name}=\"{}\"", names[0]),
                (AttrKind::Choice(_), Face::Raw) => format!("int {name}=0"),
            });
        }
        for &output in &self.wanted {
            arguments.push(format!("bool {}=False", self.switch(output)));
        }
        let results: Vec<&str> = self
            .returned
            .iter()
            .map(|&index| if self.spec.args[index].optional { "Tensor?" } else { "Tensor" })
            .collect();
        let results = match results.as_slice() {
            [one] => (*one).to_string(),
            several => format!("({})", several.join(", ")),
        };
        format!("{name}({}) -> {results}", arguments.join(", "))
    }

    /// The name of the switch that asks for an output.
    pub fn switch(&self, output: usize) -> String {
        format!("return_{}", self.spec.args[output].name)
    }
}
