import gc, time
S=[0,0,0]; C=[0,0,0]; t=0
def cb(phase, info):
    global t
    if phase=="start": t=time.process_time()
    else: S[info["generation"]]+=time.process_time()-t; C[info["generation"]]+=1
gc.callbacks.append(cb)
def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"gc seconds {S} counts {C} total cpu {time.process_time()}")
