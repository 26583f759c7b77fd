//! What profiles say of a plan.

use super::Inner;
use super::signature::Form;
use crate::op::Products;
use crate::profile;

impl profile::Called for Inner {
    fn form(&self) -> profile::CallForm {
        let (spec, args) = (self.signature.spec, &self.signature.args);
        let cost = self.work.as_ref().map(|work| (work.cost)()).unwrap_or_default();
        let bytes = |form: &Form| (form.layout.numel() * form.dtype.size()) as f64;
        let given = || spec.args.iter().zip(args).filter_map(|(arg, form)| Some((arg, form.as_ref()?)));
        let mut text = String::new();
        for (arg, form) in given() {
            let sizes: Vec<String> = form.layout.shape().iter().map(usize::to_string).collect();
            let space = if text.is_empty() { "" } else { " " };
            text += &format!("{space}{}={}[{}]", arg.name, form.dtype, sizes.join(","));
        }
        // Of what is changed only in part it is not known how much is written.
        let outputs = || given().filter(|(arg, _)| arg.is_output());
        let whole = outputs().all(|(arg, _)| !arg.is_input());
        let written = outputs().map(|(_, form)| bytes(form)).sum::<f64>().min(cost.bytes);
        profile::CallForm {
            op: spec.name,
            kernel: self.work.as_ref().map_or("", |work| work.kernel),
            device: self.device.to_string(),
            args: text,
            bytes: cost.bytes,
            written: if whole { written } else { cost.bytes / 2.0 },
            flops: cost.flops,
            products: cost.products.map(Products::name),
            tensor_bytes: given().map(|(_, form)| bytes(form)).sum(),
        }
    }
}
