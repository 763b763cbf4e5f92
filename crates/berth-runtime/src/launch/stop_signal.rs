//! Stop signal of a container: signal names and numbers. Pure.
//! Implements spec 09a §3.2.

use super::refusal::LaunchError;
use berth_proto::cri::Signal;

/// `SIGTERM`.
const TERM: i32 = 15;
/// Range of real-time signals for programs; the C library reserves the lower ones.
const FIRST_REAL_TIME: i32 = 34;
const LAST_REAL_TIME: i32 = 64;

/// Signal names without `SIG`; names with the same number are synonyms.
const NAMES: [(&str, i32); 34] = [
    ("HUP", 1),
    ("INT", 2),
    ("QUIT", 3),
    ("ILL", 4),
    ("TRAP", 5),
    ("ABRT", 6),
    ("IOT", 6),
    ("BUS", 7),
    ("FPE", 8),
    ("KILL", 9),
    ("USR1", 10),
    ("SEGV", 11),
    ("USR2", 12),
    ("PIPE", 13),
    ("ALRM", 14),
    ("TERM", TERM),
    ("STKFLT", 16),
    ("CHLD", 17),
    ("CLD", 17),
    ("CONT", 18),
    ("STOP", 19),
    ("TSTP", 20),
    ("TTIN", 21),
    ("TTOU", 22),
    ("URG", 23),
    ("XCPU", 24),
    ("XFSZ", 25),
    ("VTALRM", 26),
    ("PROF", 27),
    ("WINCH", 28),
    ("IO", 29),
    ("POLL", 29),
    ("PWR", 30),
    ("SYS", 31),
];

/// The number of the stop signal: the request's, else the image's, else SIGTERM. An unknown signal of the image also
/// becomes SIGTERM, because the image is already pulled and its containers must be stoppable.
///
/// # Errors
/// The request contains a number that CRI does not define.
pub fn stop_signal(requested: i32, image: &str) -> Result<i32, LaunchError> {
    let asked = Signal::try_from(requested).map_err(|_| LaunchError::invalid(format!("unknown signal {requested}")))?;
    if asked == Signal::RuntimeDefault {
        return Ok(number(image).unwrap_or(TERM));
    }
    number(asked.as_str_name()).ok_or_else(|| LaunchError::invalid(format!("unknown signal {}", asked.as_str_name())))
}

/// The CRI signal that container status reports; SIGTERM where CRI has no name for the number.
pub fn shown(wanted: i32) -> Signal {
    let all = (1..=65).filter_map(|value| Signal::try_from(value).ok());
    all.into_iter().find(|signal| number(signal.as_str_name()) == Some(wanted)).unwrap_or(Signal::Sigterm)
}

/// Parses `15`, `TERM`, `SIGTERM`, `SIGRTMIN+3`, `SIGRTMAX-3`, and the CRI spelling `SIGRTMINPLUS3`.
fn number(text: &str) -> Option<i32> {
    if let Ok(number) = text.parse::<i32>() {
        return (1..=LAST_REAL_TIME).contains(&number).then_some(number);
    }
    let upper = text.to_ascii_uppercase().replace("PLUS", "+").replace("MINUS", "-");
    let bare = upper.strip_prefix("SIG").unwrap_or(&upper);
    let offset = |rest: &str| if rest.is_empty() { Some(0) } else { rest.parse::<i32>().ok() };
    let real_time = |number: i32| (FIRST_REAL_TIME..=LAST_REAL_TIME).contains(&number).then_some(number);
    if let Some(rest) = bare.strip_prefix("RTMIN") {
        return real_time(FIRST_REAL_TIME.checked_add(offset(rest)?)?);
    }
    if let Some(rest) = bare.strip_prefix("RTMAX") {
        return real_time(LAST_REAL_TIME.checked_add(offset(rest)?)?);
    }
    NAMES.iter().find(|(name, _)| *name == bare).map(|(_, number)| *number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_many_spellings() {
        for (text, expected) in [
            ("15", Some(15)),
            ("TERM", Some(15)),
            ("sigquit", Some(3)),
            ("SIGRTMIN", Some(34)),
            ("SIGRTMIN+3", Some(37)),
            ("SIGRTMINPLUS15", Some(49)),
            ("SIGRTMAXMINUS14", Some(50)),
            ("RTMAX-1", Some(63)),
            ("SIGRTMAX+1", None),
            ("SIGRTMIN-1", None),
            ("0", None),
            ("65", None),
            ("", None),
            ("NONE", None),
        ] {
            assert_eq!(number(text), expected, "{text}");
        }
    }

    #[test]
    fn the_request_wins_and_everything_stops() {
        for (requested, image, expected) in [
            (Signal::RuntimeDefault, "", 15),
            (Signal::RuntimeDefault, "SIGQUIT", 3),
            (Signal::RuntimeDefault, "odd", 15),
            (Signal::Sigusr1, "SIGQUIT", 10),
            (Signal::Sigrtmaxminus14, "", 50),
        ] {
            assert_eq!(stop_signal(requested.into(), image), Ok(expected), "{requested:?} {image}");
        }
        assert!(stop_signal(99, "").is_err());
        for value in 1..=65 {
            let signal = Signal::try_from(value).expect("a signal");
            let number = stop_signal(value, "").expect("a number");
            assert_eq!(stop_signal(shown(number).into(), ""), Ok(number), "{signal:?}");
        }
    }
}
