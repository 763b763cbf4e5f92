//! Image pull policy: decision tables of spec 03b §1.1. Pure.

use berth_ports::PullPolicy;

/// Whether the image is on this node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ImagePresence {
    /// The image is present.
    Present,
    /// The image is not present.
    Absent,
    /// Not checked: the policy always pulls.
    Unknown,
}

impl ImagePresence {
    /// The `present_locally` label: `true`, `false`, or `unknown`.
    pub fn label(self) -> &'static str {
        match self {
            Self::Present => "true",
            Self::Absent => "false",
            Self::Unknown => "unknown",
        }
    }
}

/// Whether a pod may use an image that is present.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verification {
    /// The feature gate is off: presence is sufficient.
    Off,
    /// The pod may use the image.
    NotNeeded,
    /// The pod must prove by a pull that it may use the image.
    Needed,
}

/// Outcome of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PullDecision {
    /// Use the present image.
    Use {
        /// End of the event's message, for example, `already present on machine`.
        event_text: &'static str,
    },
    /// Pull the image.
    Pull,
    /// Refuse with `ErrImageNeverPull`.
    Refuse,
}

impl PullDecision {
    /// The `pull_required` label.
    pub fn label(self) -> &'static str {
        if self == Self::Pull { "true" } else { "false" }
    }
}

/// Whether presence must be checked before anything else.
pub fn checks_presence(policy: PullPolicy) -> bool {
    policy != PullPolicy::Always
}

/// Whether the pod's permission to use the image must be verified.
pub fn verifies(policy: PullPolicy, presence: ImagePresence) -> bool {
    policy != PullPolicy::Always && presence == ImagePresence::Present
}

/// Decides the step from presence and (if [`verifies`]) the pod's permission. Presence must not leak: a
/// pod without permission is refused as if the image were absent.
pub fn decide(policy: PullPolicy, presence: ImagePresence, verification: Verification) -> PullDecision {
    match (policy, presence) {
        (PullPolicy::Always, _) => PullDecision::Pull,
        (PullPolicy::Never, ImagePresence::Absent | ImagePresence::Unknown) => PullDecision::Refuse,
        (PullPolicy::IfNotPresent, ImagePresence::Absent | ImagePresence::Unknown) => PullDecision::Pull,
        (policy, ImagePresence::Present) => match verification {
            Verification::Off => PullDecision::Use { event_text: "already present on machine" },
            Verification::NotNeeded => {
                PullDecision::Use { event_text: "already present on machine and can be accessed by the pod" }
            }
            Verification::Needed if policy == PullPolicy::Never => PullDecision::Refuse,
            Verification::Needed => PullDecision::Pull,
        },
    }
}

/// Waiting reason and message of a failed pull, by the prefix of the runtime's error.
pub fn pull_failure(image: &str, text: &str) -> (&'static str, String) {
    let known = [
        ("RegistryUnavailable", "the registry is unavailable"),
        ("SignatureValidationFailed", "the signature validation failed"),
    ];
    for (prefix, words) in known {
        if let Some(rest) = text.strip_prefix(prefix) {
            return (prefix, format!("image pull failed for {image} because {words}{rest}"));
        }
    }
    ("ErrImagePull", text.to_owned())
}

/// Joins the errors of failed attempts: a single one as is, several as `[a, b]` without duplicates
/// (spec 03b §1.2).
pub fn aggregate(texts: &[String]) -> String {
    let mut seen: Vec<&str> = Vec::with_capacity(texts.len());
    for text in texts {
        if !seen.contains(&text.as_str()) {
            seen.push(text);
        }
    }
    match seen.as_slice() {
        [one] => (*one).to_owned(),
        several => format!("[{}]", several.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_meet_presence() {
        use PullPolicy::{Always, IfNotPresent, Never};
        use Verification::{Needed, NotNeeded, Off};
        let here = PullDecision::Use { event_text: "already present on machine" };
        let allowed = PullDecision::Use { event_text: "already present on machine and can be accessed by the pod" };
        let rows = [
            ("always pulls", Always, ImagePresence::Unknown, Needed, PullDecision::Pull),
            ("AC-03b-1", IfNotPresent, ImagePresence::Absent, Needed, PullDecision::Pull),
            ("AC-03b-4", Never, ImagePresence::Absent, Needed, PullDecision::Refuse),
            ("gate off", IfNotPresent, ImagePresence::Present, Off, here),
            ("gate off", Never, ImagePresence::Present, Off, here),
            ("AC-03b-17, AC-03b-18", IfNotPresent, ImagePresence::Present, NotNeeded, allowed),
            ("not needed", Never, ImagePresence::Present, NotNeeded, allowed),
            ("AC-03b-15", IfNotPresent, ImagePresence::Present, Needed, PullDecision::Pull),
            ("AC-03b-16", Never, ImagePresence::Present, Needed, PullDecision::Refuse),
        ];
        for (name, policy, presence, verification, expected) in rows {
            assert_eq!(decide(policy, presence, verification), expected, "{name}");
        }
    }

    #[test]
    fn reasons_follow_the_runtime_s_prefix() {
        let rows = [
            ("no such host", "ErrImagePull", "no such host"),
            (
                "RegistryUnavailable: connection refused",
                "RegistryUnavailable",
                "image pull failed for X because the registry is unavailable: connection refused",
            ),
            (
                "SignatureValidationFailed: no key",
                "SignatureValidationFailed",
                "image pull failed for X because the signature validation failed: no key",
            ),
        ];
        for (text, reason, message) in rows {
            assert_eq!(pull_failure("X", text), (reason, message.to_owned()));
        }
    }

    #[test]
    fn equal_failures_are_reported_once() {
        let check = |texts: &[&str], expected: &str| {
            let texts: Vec<String> = texts.iter().map(|&t| t.to_owned()).collect();
            assert_eq!(aggregate(&texts), expected);
        };
        check(&["a"], "a");
        check(&["a", "a"], "a");
        check(&["a", "b", "a"], "[a, b]");
    }
}
