//! The macro that declares an operation's `Inputs`, `Params`, `Outputs` and `Grads`.

/// Declares a struct with one field per tensor, generic over what a tensor is: a backend's handle, a borrowed handle,
/// an array, a guard.
///
/// Required fields come first, then optional ones, each with its documentation. The struct gets `as_ref`, `map`,
/// `try_map`, `named`, `from_named` and `NAMES`, which is how the harness, `Checked` and the model walk an
/// operation's tensors without knowing the operation.
///
/// ```
/// dormouse_reference::fields! {
///     /// What `scale` reads.
///     pub struct Inputs {
///         /// `[N]`
///         x;
///         optional
///         /// `[N]`
///         mask
///     }
/// }
/// let inputs = Inputs { x: 2, mask: None };
/// assert_eq!(inputs.map(|name, value| format!("{name} {value}")).x, "x 2");
/// ```
#[macro_export]
macro_rules! fields {
    (
        $(#[$meta:meta])*
        pub struct $name:ident {
            $( $(#[$required_meta:meta])* $required:ident ),* $(,)?
            $( ; optional $( $(#[$optional_meta:meta])* $optional:ident ),* $(,)? )?
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug)]
        pub struct $name<X> {
            $( $(#[$required_meta])* pub $required: X, )*
            $($( $(#[$optional_meta])* pub $optional: Option<X>, )*)?
        }

        impl<X> $name<X> {
            /// The names of all fields, in order.
            pub const NAMES: &'static [&'static str] =
                &[$( stringify!($required), )* $($( stringify!($optional), )*)?];

            /// The same fields by reference.
            pub fn as_ref(&self) -> $name<&X> {
                $name {
                    $( $required: &self.$required, )*
                    $($( $optional: self.$optional.as_ref(), )*)?
                }
            }

            /// Applies `f` to every field that is present.
            pub fn map<Y>(self, mut f: impl FnMut(&'static str, X) -> Y) -> $name<Y> {
                let _ = &mut f;
                $name {
                    $( $required: f(stringify!($required), self.$required), )*
                    $($( $optional: self.$optional.map(|x| f(stringify!($optional), x)), )*)?
                }
            }

            /// Applies `f` to every field that is present; the first error ends the walk.
            pub fn try_map<Y, E>(
                self,
                mut f: impl FnMut(&'static str, X) -> ::std::result::Result<Y, E>,
            ) -> ::std::result::Result<$name<Y>, E> {
                let _ = &mut f;
                Ok($name {
                    $( $required: f(stringify!($required), self.$required)?, )*
                    $($( $optional: self.$optional.map(|x| f(stringify!($optional), x)).transpose()?, )*)?
                })
            }

            /// The fields that are present, with their names, in order.
            pub fn named(self) -> Vec<(&'static str, X)> {
                let mut out = Vec::with_capacity(Self::NAMES.len());
                $( out.push((stringify!($required), self.$required)); )*
                $($( if let Some(x) = self.$optional { out.push((stringify!($optional), x)); } )*)?
                out
            }

            /// Builds the struct from a lookup by name; the error is the name of a required field that is missing.
            pub fn from_named(
                mut find: impl FnMut(&'static str) -> Option<X>,
            ) -> ::std::result::Result<Self, &'static str> {
                let _ = &mut find;
                Ok($name {
                    $( $required: find(stringify!($required)).ok_or(stringify!($required))?, )*
                    $($( $optional: find(stringify!($optional)), )*)?
                })
            }
        }
    };
}
