//! Who waits for which job of systemd.
//!
//! A job may have ended before the answer that names it is read: as long as somebody waits for such an answer, ends are
//! kept.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::oneshot;

/// Ends that are kept at most; more within one question is nobody's.
const MOST_KEPT: usize = 512;

/// The jobs of a connection.
#[derive(Clone, Debug, Default)]
pub(super) struct Jobs(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    asking: usize,
    ended: VecDeque<(String, String)>,
    waiting: HashMap<String, oneshot::Sender<String>>,
}

/// A question whose answer names a job.
#[derive(Debug)]
pub(super) struct Asking(Jobs);

impl Jobs {
    /// Somebody asks: from now on no end is missed.
    pub(super) fn ask(&self) -> Asking {
        self.state().asking += 1;
        Asking(self.clone())
    }

    /// A job has ended.
    pub(super) fn ended(&self, job: String, result: String) {
        let mut state = self.state();
        if let Some(waiter) = state.waiting.remove(&job) {
            // Who waited may have given up.
            let _ = waiter.send(result);
        } else if state.asking > 0 {
            if state.ended.len() == MOST_KEPT {
                state.ended.pop_front();
            }
            state.ended.push_back((job, result));
        }
    }

    /// The connection is gone: nobody will be told any more.
    pub(super) fn give_up(&self) {
        self.state().waiting.clear();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Asking {
    /// The answer named this job: its end.
    pub(super) fn named(self, job: &str) -> oneshot::Receiver<String> {
        let (told, end) = oneshot::channel();
        let mut state = self.0.state();
        match state.ended.iter().find(|(ended, _)| ended == job) {
            // The other end is ours, and there.
            Some((_, result)) => drop(told.send(result.clone())),
            None => {
                state.waiting.retain(|_, waiter| !waiter.is_closed());
                state.waiting.insert(job.to_owned(), told);
            }
        }
        end
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.asking -= 1;
        if state.asking == 0 {
            state.ended.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_told_whether_it_comes_before_or_after_its_name() {
        let jobs = Jobs::default();
        let end = |job: &str| jobs.ended(job.to_owned(), "done".to_owned());
        let asking = jobs.ask();
        end("/1");
        assert_eq!(asking.named("/1").try_recv().as_deref(), Ok("done"));
        let mut later = jobs.ask().named("/2");
        assert!(later.try_recv().is_err());
        end("/2");
        assert_eq!(later.try_recv().as_deref(), Ok("done"));
        // Nobody asked.
        end("/3");
        assert!(jobs.ask().named("/3").try_recv().is_err());
        let mut lost = jobs.ask().named("/4");
        jobs.give_up();
        assert_eq!(lost.try_recv(), Err(oneshot::error::TryRecvError::Closed));
        let state = jobs.state();
        assert_eq!((state.asking, state.ended.len()), (0, 0));
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let jobs = Jobs::default();
        let _asking = jobs.ask();
        for n in 0..2 * MOST_KEPT {
            jobs.ended(n.to_string(), "done".to_owned());
        }
        assert_eq!(jobs.state().ended.len(), MOST_KEPT);
    }
}
