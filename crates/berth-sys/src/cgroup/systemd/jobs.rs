//! Pending systemd jobs and their waiters.
//!
//! A job may end before the reply that names it is read: results are stored while such a reply is outstanding.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::oneshot;

/// Maximum number of stored results; more within one call belong to other clients.
const MOST_KEPT: usize = 512;

/// Jobs of a connection.
#[derive(Clone, Debug, Default)]
pub(super) struct Jobs(Arc<Mutex<JobsState>>);

#[derive(Debug, Default)]
struct JobsState {
    asking: usize,
    ended: VecDeque<(String, String)>,
    waiting: HashMap<String, oneshot::Sender<String>>,
}

/// A call in progress whose reply names a job.
#[derive(Debug)]
pub(super) struct PendingCall(Jobs);

impl Jobs {
    /// Registers a call: from now on no result is missed.
    pub(super) fn begin_call(&self) -> PendingCall {
        self.state().asking += 1;
        PendingCall(self.clone())
    }

    /// Delivers the result of a finished job.
    pub(super) fn ended(&self, job: String, result: String) {
        let mut state = self.state();
        if let Some(waiter) = state.waiting.remove(&job) {
            // The waiter may have timed out.
            let _ = waiter.send(result);
        } else if state.asking > 0 {
            if state.ended.len() == MOST_KEPT {
                state.ended.pop_front();
            }
            state.ended.push_back((job, result));
        }
    }

    /// Cancels all waiters: the connection is lost.
    pub(super) fn cancel_all(&self) {
        self.state().waiting.clear();
    }

    fn state(&self) -> MutexGuard<'_, JobsState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PendingCall {
    /// Waits for the result of the job that the reply named.
    pub(super) fn named(self, job: &str) -> oneshot::Receiver<String> {
        let (sender, receiver) = oneshot::channel();
        let mut state = self.0.state();
        match state.ended.iter().find(|(ended, _)| ended == job) {
            // The receiver exists: it is returned below.
            Some((_, result)) => drop(sender.send(result.clone())),
            None => {
                state.waiting.retain(|_, waiter| !waiter.is_closed());
                state.waiting.insert(job.to_owned(), sender);
            }
        }
        receiver
    }
}

impl Drop for PendingCall {
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
    fn a_result_is_delivered_whether_it_arrives_before_or_after_the_job_path() {
        let jobs = Jobs::default();
        let end = |job: &str| jobs.ended(job.to_owned(), "done".to_owned());
        let asking = jobs.begin_call();
        end("/1");
        assert_eq!(asking.named("/1").try_recv().as_deref(), Ok("done"));
        let mut later = jobs.begin_call().named("/2");
        assert!(later.try_recv().is_err());
        end("/2");
        assert_eq!(later.try_recv().as_deref(), Ok("done"));
        // No call is in progress.
        end("/3");
        assert!(jobs.begin_call().named("/3").try_recv().is_err());
        let mut lost = jobs.begin_call().named("/4");
        jobs.cancel_all();
        assert_eq!(lost.try_recv(), Err(oneshot::error::TryRecvError::Closed));
        let state = jobs.state();
        assert_eq!((state.asking, state.ended.len()), (0, 0));
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let jobs = Jobs::default();
        let _asking = jobs.begin_call();
        for n in 0..2 * MOST_KEPT {
            jobs.ended(n.to_string(), "done".to_owned());
        }
        assert_eq!(jobs.state().ended.len(), MOST_KEPT);
    }
}
