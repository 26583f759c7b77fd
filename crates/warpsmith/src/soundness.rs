//! Programs that must not compile: each would write a tensor twice at once, read one that is being written, use memory
//! after its owner, or hand kernels memory that nobody checked. The one before each differs only in what makes it wrong.
//!
//! A call that was given its outputs can be run once:
//! ```
//! # use warpsmith::{DType, Device, Stream, Tensor, ops::LinearBackward};
//! # let tensor = |shape: &[usize]| Tensor::zeros(shape, DType::F32, Device::Cpu).unwrap();
//! # let (x, w, dout, mut dx) = (tensor(&[2, 4]), tensor(&[3, 4]), tensor(&[2, 3]), tensor(&[2, 4]));
//! let call = LinearBackward::new(&x, &w, &dout).dx(&mut dx);
//! call.run(&Stream::Host)?;
//! # Ok::<(), warpsmith::Error>(())
//! ```
//! ```compile_fail,E0599
//! # use warpsmith::{DType, Device, Stream, Tensor, ops::LinearBackward};
//! # let tensor = |shape: &[usize]| Tensor::zeros(shape, DType::F32, Device::Cpu).unwrap();
//! # let (x, w, dout, mut dx) = (tensor(&[2, 4]), tensor(&[3, 4]), tensor(&[2, 3]), tensor(&[2, 4]));
//! let call = LinearBackward::new(&x, &w, &dout).dx(&mut dx);
//! call.clone().run(&Stream::Host)?;
//! # Ok::<(), warpsmith::Error>(())
//! ```
//! ```compile_fail,E0499
//! # use warpsmith::{DType, Device, Stream, Tensor, ops::LinearBackward};
//! # let tensor = |shape: &[usize]| Tensor::zeros(shape, DType::F32, Device::Cpu).unwrap();
//! # let (x, w, dout, mut dx) = (tensor(&[2, 4]), tensor(&[3, 4]), tensor(&[2, 3]), tensor(&[2, 4]));
//! let call = LinearBackward::new(&x, &w, &dout).dx(&mut dx);
//! let other = LinearBackward::new(&x, &w, &dout).dx(&mut dx);
//! call.run(&Stream::Host)?;
//! other.run(&Stream::Host)?;
//! # Ok::<(), warpsmith::Error>(())
//! ```
//!
//! What a call's arguments show of an output does not outlive their next run:
//! ```
//! # use warpsmith::{DType, Device, Stream, Tensor, op::{Args, Attrs, Select}, ops};
//! # let op = ops::find("mul_add").unwrap();
//! # let tensor = || Tensor::zeros(&[4], DType::F32, Device::Cpu).unwrap();
//! # let (x, mut out) = (tensor(), tensor());
//! let mut args = Args::new(op.spec()).input(0, x.view()).input(1, x.view()).input(2, x.view());
//! args = args.output(3, out.view_mut());
//! let shown = *args.get(3).unwrap();
//! assert_eq!(shown.to_f64()?, [0.0; 4]);
//! op.run(&mut args, &Attrs::defaults(op.spec()), &Stream::Host, &Select::default())?;
//! # Ok::<(), warpsmith::Error>(())
//! ```
//! ```compile_fail,E0502
//! # use warpsmith::{DType, Device, Stream, Tensor, op::{Args, Attrs, Select}, ops};
//! # let op = ops::find("mul_add").unwrap();
//! # let tensor = || Tensor::zeros(&[4], DType::F32, Device::Cpu).unwrap();
//! # let (x, mut out) = (tensor(), tensor());
//! let mut args = Args::new(op.spec()).input(0, x.view()).input(1, x.view()).input(2, x.view());
//! args = args.output(3, out.view_mut());
//! let shown = *args.get(3).unwrap();
//! op.run(&mut args, &Attrs::defaults(op.spec()), &Stream::Host, &Select::default())?;
//! assert_eq!(shown.to_f64()?, [0.0; 4]);
//! # Ok::<(), warpsmith::Error>(())
//! ```
//! ```compile_fail,E0308
//! # use warpsmith::{DType, Device, Stream, Tensor, op::{Args, Attrs, Select}, ops};
//! # let op = ops::find("mul_add").unwrap();
//! # let args = Args::new(op.spec());
//! // Two threads could run shared arguments at once.
//! op.run(&args, &Attrs::defaults(op.spec()), &Stream::Host, &Select::default())?;
//! # Ok::<(), warpsmith::Error>(())
//! ```
//!
//! A tensor is not an input and, by another way, an output of one call:
//! ```compile_fail,E0502
//! # use warpsmith::{DType, Device, Stream, Tensor, ops::Activation};
//! # let mut x = Tensor::zeros(&[4], DType::F32, Device::Cpu)?;
//! Activation::relu(&x).run_into(&mut x, &Stream::Host)?;
//! # Ok::<(), warpsmith::Error>(())
//! ```
//!
//! Halves of a tensor can be written at once, but not one half twice:
//! ```
//! # use warpsmith::{DType, Device, Stream, Tensor, ops::Activation};
//! # let (x, mut both) = (Tensor::zeros(&[2, 4], DType::F32, Device::Cpu)?, Tensor::zeros(&[4, 4], DType::F32, Device::Cpu)?);
//! let (first, second) = both.view_mut().split_at(0, 2).unwrap();
//! Activation::relu(&x).run_into(first, &Stream::Host)?;
//! Activation::relu(&x).run_into(second, &Stream::Host)?;
//! # Ok::<(), warpsmith::Error>(())
//! ```
//! ```compile_fail,E0382
//! # use warpsmith::{DType, Device, Stream, Tensor, ops::Activation};
//! # let (x, mut both) = (Tensor::zeros(&[2, 4], DType::F32, Device::Cpu)?, Tensor::zeros(&[4, 4], DType::F32, Device::Cpu)?);
//! let (first, second) = both.view_mut().split_at(0, 2).unwrap();
//! Activation::relu(&x).run_into(first, &Stream::Host)?;
//! Activation::relu(&x).run_into(first, &Stream::Host)?;
//! # Ok::<(), warpsmith::Error>(())
//! ```
//!
//! Views do not outlive their tensor:
//! ```compile_fail,E0505
//! # use warpsmith::{DType, Device, Tensor};
//! let x = Tensor::zeros(&[4], DType::F32, Device::Cpu)?;
//! let view = x.view();
//! drop(x);
//! view.to_f64()?;
//! # Ok::<(), warpsmith::Error>(())
//! ```
//!
//! Kernels trust their op's check, so pairing the two is `unsafe`:
//! ```
//! # use warpsmith::{Result, op::{Args, Attrs, Cost, Kernel, Op, OpSpec}, ops::rms_norm};
//! struct Mine;
//! // SAFETY: its own check.
//! unsafe impl Op for Mine {
//!     type Problem = <rms_norm::Forward as Op>::Problem;
//!     const SPEC: OpSpec = rms_norm::Forward::SPEC;
//!     fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Self::Problem> {
//!         rms_norm::Forward::check(args, attrs)
//!     }
//!     fn kernels() -> &'static [Kernel<Self::Problem>] {
//!         rms_norm::Forward::kernels()
//!     }
//!     fn cost(problem: &Self::Problem) -> Cost {
//!         rms_norm::Forward::cost(problem)
//!     }
//! }
//! ```
//! ```compile_fail,E0200
//! # use warpsmith::{Result, op::{Args, Attrs, Cost, Kernel, Op, OpSpec}, ops::rms_norm};
//! struct Mine;
//! impl Op for Mine {
//!     type Problem = <rms_norm::Forward as Op>::Problem;
//!     const SPEC: OpSpec = rms_norm::Forward::SPEC;
//!     fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Self::Problem> {
//!         rms_norm::Forward::check(args, attrs)
//!     }
//!     fn kernels() -> &'static [Kernel<Self::Problem>] {
//!         rms_norm::Forward::kernels()
//!     }
//!     fn cost(problem: &Self::Problem) -> Cost {
//!         rms_norm::Forward::cost(problem)
//!     }
//! }
//! ```
//! ```compile_fail,E0277
//! # use warpsmith::{Result, Stream, device::DeviceInfo, op::*};
//! // Not even behind the object-safe face.
//! struct Mine;
//! impl AnyOp for Mine {
//!     fn spec(&self) -> &'static OpSpec { todo!() }
//!     fn kernels(&self) -> Vec<KernelInfo> { todo!() }
//!     fn outputs(&self, _: &Args<'_>, _: &Attrs, _: &[usize]) -> Result<Vec<Option<Form>>> { todo!() }
//!     fn check(&self, _: &Args<'_>, _: &Attrs) -> Result<()> { todo!() }
//!     fn cost(&self, _: &Args<'_>, _: &Attrs) -> Result<Cost> { todo!() }
//!     fn explain(&self, _: &Args<'_>, _: &Attrs, _: &DeviceInfo, _: &Select) -> Result<Explanation> { todo!() }
//!     fn prepare(&self, _: &Args<'_>, _: &Attrs, _: &Select) -> Result<Plan> { todo!() }
//!     fn run(&self, _: &mut Args<'_>, _: &Attrs, _: &Stream, _: &Select) -> Result<Option<&'static str>> { todo!() }
//!     fn remember(&self, _: &Args<'_>, _: &Attrs, _: &DeviceInfo, _: &str, _: bool) -> Result<()> { todo!() }
//! }
//! ```
//!
//! A kernel can be looked at, but only a plan has what it runs with, whatever features the library is built with:
//! ```
//! # use warpsmith::{Device, op::{Launch, Op}, ops::rms_norm};
//! fn look(launch: &Launch<'_, <rms_norm::Forward as Op>::Problem>) -> usize {
//!     launch.workspace
//! }
//! ```
//! ```compile_fail,E0639
//! # use warpsmith::{Device, op::{Launch, Op}, ops::rms_norm};
//! fn forge<'a>(launch: &'a Launch<'a, <rms_norm::Forward as Op>::Problem>) -> Launch<'a, <rms_norm::Forward as Op>::Problem> {
//!     let Launch { problem, args, info, stream, tier, cuda, .. } = *launch;
//!     Launch { problem, args, info, stream, workspace: 64, tier, cuda }
//! }
//! ```
//!
//! What a file holds can change under a mapping, and not under a copy:
//! ```no_run
//! # use warpsmith::tensor::MappedFile;
//! let file = MappedFile::read("weights")?;
//! # Ok::<(), warpsmith::Error>(())
//! ```
//! ```compile_fail,E0133
//! # use warpsmith::tensor::MappedFile;
//! let file = MappedFile::map("weights")?;
//! # Ok::<(), warpsmith::Error>(())
//! ```
