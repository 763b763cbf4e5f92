//! Host ID space for user namespaces of pods. Pure. Implements spec 06 §5.2.

/// Number of all IDs.
const ALL: u64 = 1 << 32;
/// Minimum unit of a range, so that it contains every ID that images may use.
const GRANULE: u64 = 65_536;

/// Host IDs in units of `per_pod`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IdSpace {
    /// First host ID.
    pub first: u64,
    /// Number of host IDs.
    pub length: u64,
    /// `userNamespaces.idsPerPod`.
    pub per_pod: u64,
}

/// Why the ID space is invalid; the agent does not start.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum IdSpaceError {
    /// `idsPerPod` is not a multiple of 65536.
    #[error("kubelet user namespace length {0} is not a multiple of 65536")]
    PerPod(u64),
    /// The first ID is not a multiple of `idsPerPod`.
    #[error("kubelet user assigned ID {first} is not a multiple of {per_pod}")]
    First {
        /// First ID.
        first: u64,
        /// `idsPerPod`.
        per_pod: u64,
    },
    /// The first ID is in the range of the node itself.
    #[error("kubelet user assigned ID {first} must be greater or equal to {per_pod}")]
    TooLow {
        /// First ID.
        first: u64,
        /// `idsPerPod`.
        per_pod: u64,
    },
    /// The number of IDs is not a multiple of `idsPerPod`.
    #[error("kubelet user assigned IDs length {length} is not a multiple of {per_pod}")]
    Length {
        /// Number of IDs.
        length: u64,
        /// `idsPerPod`.
        per_pod: u64,
    },
    /// There are fewer ranges than pods.
    #[error("kubelet user assigned IDs are not enough to support {0} pods")]
    TooFew(u64),
    /// `getsubids` prints different ranges for users and groups.
    #[error("mismatched subuids and subgids for user \"kubelet\"")]
    Mismatch,
    /// `getsubids` prints several ranges.
    #[error("error parsing line {0:?}: it must contain only one line")]
    Lines(String),
    /// The output of `getsubids` cannot be parsed.
    #[error("invalid line {0:?}")]
    Line(String),
}

impl IdSpace {
    /// All IDs above the first range, for nodes without subordinate IDs of a user `kubelet`.
    pub fn whole(per_pod: u64) -> Self {
        Self { first: per_pod, length: ALL.saturating_sub(per_pod), per_pod }
    }

    /// Parses the output of `getsubids kubelet` and `getsubids -g kubelet`.
    ///
    /// # Errors
    /// The outputs are not one identical single range.
    pub fn of_subids(users: &str, groups: &str, per_pod: u64) -> Result<Self, IdSpaceError> {
        if users != groups {
            return Err(IdSpaceError::Mismatch);
        }
        let line = users.trim_end_matches('\n');
        if line.contains('\n') {
            return Err(IdSpaceError::Lines(users.to_owned()));
        }
        let fields: Vec<&str> = line.split_whitespace().collect();
        let numbers = match fields.as_slice() {
            [_, _, first, length] => first.parse::<u32>().ok().zip(length.parse::<u32>().ok()),
            _ => None,
        };
        let (first, length) = numbers.ok_or_else(|| IdSpaceError::Line(line.to_owned()))?;
        Ok(Self { first: first.into(), length: length.into(), per_pod })
    }

    /// Checks that the ID space is sufficient for that many pods.
    ///
    /// # Errors
    /// The first violated rule.
    pub fn checked(self, max_pods: u64) -> Result<Self, IdSpaceError> {
        let Self { first, length, per_pod } = self;
        if per_pod == 0 || per_pod % GRANULE != 0 {
            return Err(IdSpaceError::PerPod(per_pod));
        }
        if first % per_pod != 0 {
            return Err(IdSpaceError::First { first, per_pod });
        }
        if first < per_pod {
            return Err(IdSpaceError::TooLow { first, per_pod });
        }
        if length % per_pod != 0 {
            return Err(IdSpaceError::Length { length, per_pod });
        }
        if length / per_pod < max_pods {
            return Err(IdSpaceError::TooFew(max_pods));
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const N: u64 = 65_536;

    #[test]
    fn without_a_kubelet_user_all_but_the_first_range_is_ours() {
        let space = IdSpace::whole(N).checked(110).expect("enough");
        assert_eq!((space.first, space.length), (N, (1 << 32) - N));
    }

    #[test]
    fn the_kubelet_users_range_is_read() {
        let text = "0: kubelet 65536 7208960\n";
        let space = IdSpace::of_subids(text, text, N).expect("a range");
        assert_eq!((space.first, space.length), (N, 110 * N));
        for (users, groups, expected) in [
            (text, "0: kubelet 65536 1\n", "mismatched subuids and subgids for user \"kubelet\""),
            ("a\nb\n", "a\nb\n", "error parsing line \"a\\nb\\n\": it must contain only one line"),
            ("0: kubelet 1\n", "0: kubelet 1\n", "invalid line \"0: kubelet 1\""),
            ("0: kubelet 1 4294967296\n", "0: kubelet 1 4294967296\n", "invalid line \"0: kubelet 1 4294967296\""),
            ("", "", "invalid line \"\""),
        ] {
            assert_eq!(IdSpace::of_subids(users, groups, N).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn a_space_must_fit_its_units() {
        for (first, length, per_pod, expected) in [
            (N, 110 * N, N - 1, Some("kubelet user namespace length 65535 is not a multiple of 65536")),
            (N, 110 * N, 0, Some("kubelet user namespace length 0 is not a multiple of 65536")),
            (N + 1, 110 * N, N, Some("kubelet user assigned ID 65537 is not a multiple of 65536")),
            (0, 110 * N, N, Some("kubelet user assigned ID 0 must be greater or equal to 65536")),
            (N, 110 * N + 1, N, Some("kubelet user assigned IDs length 7208961 is not a multiple of 65536")),
            // AC-06-10
            (N, 100 * N, N, Some("kubelet user assigned IDs are not enough to support 110 pods")),
            (N, 110 * N, N, None),
        ] {
            let got = IdSpace { first, length, per_pod }.checked(110).err().map(|e| e.to_string());
            assert_eq!(got.as_deref(), expected);
        }
    }
}
