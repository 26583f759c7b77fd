//! The unit tests, which are part of the library under the feature `tests`. A harness of their own would mean that the library,
//! which takes most of a build's time, is compiled once for them and once for everything else. `tests/units.rs` runs them.

/// A function with the attribute `#[test]`.
pub struct UnitTest {
    path: &'static str,
    /// Whether it is run only when asked for.
    pub ignored: bool,
    /// The test. Panics if it fails.
    pub run: fn(),
}

impl UnitTest {
    #[doc(hidden)]
    pub const fn new(path: &'static str, ignored: bool, run: fn()) -> UnitTest {
        UnitTest { path, ignored, run }
    }

    /// The path of the function within the crate.
    pub fn name(&self) -> &'static str {
        self.path.split_once("::").map_or(self.path, |(_, name)| name)
    }
}

inventory::collect!(UnitTest);

/// All of them, in no order.
pub fn all() -> impl Iterator<Item = &'static UnitTest> {
    inventory::iter::<UnitTest>.into_iter()
}

/// What the attribute makes of a function's name.
macro_rules! submit {
    ($name:ident, $ignored:literal) => {
        ::inventory::submit! {
            $crate::unit_tests::UnitTest::new(concat!(module_path!(), "::", stringify!($name)), $ignored, $name)
        }
    };
}
pub(crate) use submit;
