//! Kernel parameter structs, each with a C declaration generated from the same definition.
//!
//! [`kernel_params!`](crate::kernel_params) declares a `#[repr(C)]` struct and generates the C declaration that
//! precedes the kernel's source, with `static_assert`s on its size and every offset, so that host and device cannot
//! disagree silently. (`__INTADDR__` is the compiler's internal `offsetof`: NVRTC has neither a header nor a builtin
//! for it.)

/// A type that kernels receive by value.
///
/// # Safety
/// The C declaration must have the same size and layout as the Rust type.
pub unsafe trait CType: Copy {
    /// Declares a field of this type.
    fn field(name: &str) -> String;
    /// Emits the declarations the type needs, each once.
    fn declare(_out: &mut String) {}
    /// Lists the parts that hold addresses, which differ from call to call, with their offsets from `at` on.
    fn addresses(_at: usize, _found: &mut Vec<(usize, AddressKind)>) {}
}

/// How a parameter holds an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressKind {
    /// As a `u64`. Other numbers of 64 bits are [`Bits64`] or signed.
    Plain,
    /// Inside a description of a tensor for the copy engine.
    TensorMap,
}

macro_rules! c_scalars {
    ($($t:ty => $c:literal),* $(,)?) => {$(
        // SAFETY: these C types have the same size and representation on every CUDA platform.
        unsafe impl CType for $t {
            fn field(name: &str) -> String { format!(concat!($c, " {}"), name) }
        }
    )*};
}
c_scalars!(i64 => "long long", u32 => "unsigned int", i32 => "int", f32 => "float");

/// 64 bits that are not an address.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bits64(pub u64);

// SAFETY: as above.
unsafe impl CType for Bits64 {
    fn field(name: &str) -> String {
        format!("unsigned long long {name}")
    }
}

// SAFETY: as above.
unsafe impl CType for u64 {
    fn field(name: &str) -> String {
        format!("unsigned long long {name}")
    }
    fn addresses(at: usize, found: &mut Vec<(usize, AddressKind)>) {
        found.push((at, AddressKind::Plain));
    }
}

// SAFETY: an array of a C type is a C array.
unsafe impl<T: CType, const N: usize> CType for [T; N] {
    fn field(name: &str) -> String {
        // In C the outer length of a nested array comes first: `T name[outer][inner]`.
        T::field(&format!("{name}[{N}]"))
    }
    fn declare(out: &mut String) {
        T::declare(out);
    }
    fn addresses(at: usize, found: &mut Vec<(usize, AddressKind)>) {
        (0..N).for_each(|i| T::addresses(at + i * size_of::<T>(), found));
    }
}

/// A member of a parameter struct, as [`declare_struct`] needs it.
pub struct Member {
    /// Its name.
    pub name: &'static str,
    /// Where it begins.
    pub offset: usize,
    /// [`CType::field`] of its type.
    pub field: fn(&str) -> String,
    /// [`CType::declare`] of its type.
    pub declare: fn(&mut String),
}

/// Emits the C twin of a parameter struct, after those of its members, unless it is there already.
pub fn declare_struct(out: &mut String, name: &str, size: usize, members: &[Member]) {
    if out.contains(&format!("struct {name} {{")) {
        return;
    }
    members.iter().for_each(|member| (member.declare)(out));
    *out += &format!("struct {name} {{\n");
    for member in members {
        *out += &format!("  {};\n", (member.field)(member.name));
    }
    *out += &format!("}};\nstatic_assert(sizeof({name}) == {size}, \"size\");\n");
    for Member { name: field, offset, .. } in members {
        *out += &format!(
            "static_assert((unsigned long long)__INTADDR__(&((({name}*)0)->{field})) == {offset}, \"{field}\");\n"
        );
    }
}

/// Declares a parameter struct and its C twin.
#[macro_export]
macro_rules! kernel_params {
    ($(#[$meta:meta])* $vis:vis struct $name:ident { $($(#[$fmeta:meta])* $field:ident : $t:ty),* $(,)? }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        $vis struct $name { $($(#[$fmeta])* pub $field: $t),* }

        // SAFETY: `declare` asserts size and offsets of the C twin against this struct.
        unsafe impl $crate::jit::CType for $name {
            fn field(name: &str) -> String {
                format!(concat!(stringify!($name), " {}"), name)
            }
            fn addresses(at: usize, found: &mut Vec<(usize, $crate::jit::AddressKind)>) {
                $(<$t as $crate::jit::CType>::addresses(at + std::mem::offset_of!($name, $field), found);)*
            }
            fn declare(out: &mut String) {
                use $crate::jit::{CType, Member};
                $crate::jit::declare_struct(out, stringify!($name), size_of::<$name>(), &[
                    $(Member {
                        name: stringify!($field),
                        offset: std::mem::offset_of!($name, $field),
                        field: <$t as CType>::field,
                        declare: <$t as CType>::declare,
                    }),*
                ]);
            }
        }

        impl $name {
            /// The C declarations of this struct and all it contains.
            #[allow(dead_code)]
            pub fn prelude() -> String {
                let mut out = String::new();
                <Self as $crate::jit::CType>::declare(&mut out);
                out
            }
        }
    };
}

#[cfg(feature = "tests")]
mod tests {
    kernel_params! { struct Inner { a: i32, b: u64 } }
    kernel_params! { struct Outer { x: f32, inner: Inner, strides: [[i64; 8]; 3] } }

    #[test]
    fn addresses_are_found_in_nested_structs_and_arrays() {
        kernel_params! { struct Many { n: i32, at: [u64; 2], inner: [Inner; 2] } }
        let mut found = Vec::new();
        <Many as crate::jit::CType>::addresses(8, &mut found);
        let plain = |at| (at, crate::jit::AddressKind::Plain);
        assert_eq!(found, [16, 24, 40, 56].map(plain));
    }

    #[test]
    fn twins_are_declared_once_with_asserts() {
        let text = Outer::prelude();
        assert_eq!(text.matches("struct Inner {").count(), 1);
        assert!(text.contains("long long strides[3][8];"), "{text}");
        assert!(text.contains("static_assert(sizeof(Outer) == 216"), "{text}");
        assert!(text.contains("__INTADDR__(&(((Inner*)0)->b)) == 8"), "{text}");
    }
}
